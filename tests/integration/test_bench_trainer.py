"""The trainer's benchmark runs, and writes the figures that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import require

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "trainer.py"
FIGURES = (
    "handover_256_s", "handover_peak_ratio", "decoupled_ratio", "policy_utilisation_coupled",
    "policy_utilisation_decoupled", "early_close_ratio",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_it_runs_at_small_sizes(tmp_path: Path) -> None:
    require("redis-server")
    file = tmp_path / "trainer.json"
    command = [sys.executable, "-P", str(BENCHMARK), "--short", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(file.read_text())
    assert all(told[name] > 0 for name in FIGURES), told
    assert told["early_close_cut_rollouts"] > 0
    assert told["handover_rollouts"] == 16
    for loop in ("coupled", "decoupled"):
        assert 0 < told[f"policy_utilisation_{loop}"] <= 1.01, "busy slot-seconds over all slots' seconds"
        assert told[f"{loop}_rollouts"] == 16
