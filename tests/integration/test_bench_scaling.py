"""The scaling benchmark runs on a real Slurm, and writes the figures that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import require

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "scaling.py"
FIGURES = (
    "rollouts_per_s_1", "rollouts_per_s_2", "efficiency_2", "cpu_use_1", "cpu_use_2", "control_plane_rollouts_per_s",
    "ideal_rollouts_per_s_1",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_it_runs_at_small_sizes(tmp_path: Path) -> None:
    for program in ("redis-server", "bwrap", "sbatch", "slurmctld", "slurmd", "munged"):
        require(program)
    file = tmp_path / "scaling.json"
    command = [sys.executable, "-P", str(BENCHMARK), "--short", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(file.read_text())
    assert all(told[name] > 0 for name in FIGURES), told
    assert told["rollouts_per_s_1"] < told["ideal_rollouts_per_s_1"], "no faster than model and commands allow"
    assert told["efficiency_2"] == pytest.approx(told["rollouts_per_s_2"] / told["rollouts_per_s_1"] / 2, abs=0.01)
    assert told["cores_2_run"] > 0 and told["cores_2_sandboxes"] > 0 and "killed at the end" not in done.stderr
