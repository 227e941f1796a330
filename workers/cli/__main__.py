"""`python -P -m workers.cli`: the same as `rollout`, for processes that start others with the very same Python."""

from workers.cli import main

main()
