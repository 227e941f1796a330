"""watched_train.py as two processes that train together (torchrun); takes its options."""

from __future__ import annotations

import os
import sys
from pathlib import Path

WATCHED = Path(__file__).parent / "watched_train.py"


def main() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WATCHED), *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-W", "ignore", *words])


if __name__ == "__main__":
    main()
