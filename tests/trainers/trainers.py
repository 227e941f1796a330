"""The environment with real trainers, and processes in it: found or said to be missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-trainers"
PYTHON = VENV / "bin" / "python"

# No network, and one thread for each library: several processes share the machine.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled",
}  # fmt: skip


def require() -> None:
    """Without the venv the test is skipped, or fails where CI=true."""
    if (VENV / ".installed").is_file():
        return
    sentence = f"{VENV.name} is not there, or not whole: say `make test-trainers`, which makes it"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)


def environment() -> dict[str, str]:
    """For processes of `.venv-trainers`: ours without what belongs to the tests' own Python, and no network."""
    left_out = ("PYTHON", "VIRTUAL_ENV", "ROLLOUT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | _ENVIRONMENT


def run(script: Path, *arguments: str, timeout: float) -> str:
    """Run a script to its end; what it printed. Raises AssertionError with all of it where it fails."""
    require()
    command = [str(PYTHON), "-W", "ignore", str(script), *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=environment()
    )
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}:\n{done.stdout}{done.stderr[-6000:]}"
    return done.stdout
