"""Real tasks for tests and benchmarks: the project holds none of them.

They are data files of the wheel nemo-gym 0.7.0 (Apache-2.0). A copy of them in `../shared/data` is taken first, else
the wheel is downloaded by name into `.ci/cache`; where neither can be had, the test is skipped with the reason.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parents[1]
SHARED = HOME.parent / "shared" / "data"
CACHE = HOME / ".ci" / "cache"
WHEEL = "nemo-gym==0.7.0"


@functools.cache
def compmath() -> list[dict[str, Any]]:
    """128 competition problems: id, question, expected_answer."""
    copy = SHARED / "math" / "compmath.jsonl"
    text = copy.read_text() if copy.exists() else _from_wheel("expected_answer", ".jsonl")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


@functools.cache
def pipdeptree() -> dict[str, Any]:
    """One SWE-rebench instance whose source is the sdist of pipdeptree 2.12.0."""
    copy = SHARED / "swe" / "tox-dev__pipdeptree-279.json"
    if copy.exists():
        return dict(json.loads(copy.read_text()))
    for line in _from_wheel("tox-dev__pipdeptree-279", ".jsonl").splitlines():
        row = json.loads(line)
        if row.get("instance_id") == "tox-dev__pipdeptree-279":
            return dict(row)
    pytest.skip(f"{WHEEL} holds no instance tox-dev__pipdeptree-279")


def _from_wheel(word: str, suffix: str) -> str:
    """The first data file of the wheel that holds `word`."""
    with zipfile.ZipFile(_wheel()) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(suffix) and word.encode() in (data := wheel.read(name)):
                return data.decode()
    pytest.skip(f"{WHEEL} holds no data with {word!r}")


def _wheel() -> Path:
    found = sorted(CACHE.glob("nemo_gym-*.whl"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version", "3.12"]
        command += ["--only-binary", ":all:", "-d", str(CACHE), WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"no ../shared/data, and {WHEEL} can't be downloaded: {done.stderr.strip()[-200:]}")
        found = sorted(CACHE.glob("nemo_gym-*.whl"))
    return found[0]
