"""The benchmark of payload files runs, and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import require

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "payload_files.py"


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_it_runs_at_small_sizes(tmp_path: Path) -> None:
    require("redis-server")
    file = tmp_path / "payload_files.json"
    command = [sys.executable, "-P", str(BENCHMARK), "--short", "--json", str(file), "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(file.read_text())
    for name in ("memory_mb", "write_ms_p50", "pop_s", "ack_s"):
        assert told[f"redis_{name}"] > 0 and told[f"files_{name}"] > 0, told
    assert told["files_memory_mb"] < told["redis_memory_mb"]
