"""A whole line as jobs of a test's Slurm, by `rollout slurm up`; what ends is replaced by the line's own keepers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Config, load
from pipeline.config_slurm import KINDS
from tests.slurm.cluster import Cluster, Row

HERE = Path(__file__).parent
PROGRAM = str(Path(sys.executable).with_name("rollout"))

# Short leases, little time to drain, small jobs. A second after SIGTERM less than Slurm's five is left for the drain.
QUICK: dict[str, dict[str, Any]] = {
    "lease": {"seconds": 4.0, "beat": 0.8, "tick": 0.3, "done_seconds": 20.0},
    "retry": {"backoff": 0.05, "losses": 1000},
    "redis": {"socket_timeout": 1.0, "connect_timeout": 1.0},
    "limits": {"grace": 2.0},
    "sandbox": {"driver": "local", "sweep": 1.0, "max_live": 8},
    "handlers": {"path": str(HERE)},
    "workers": {"init": {"slots": 4}, "run": {"slots": 8}, "eval": {"slots": 4}},
}
JOB = {"cpus": 1, "memory_mb": 1024, "time": "2:00:00"}


@contextlib.contextmanager
def line_folder() -> Iterator[Path]:
    """A folder for a line and its sandboxes, on a short path: it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="sr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class LineJobs:
    """`sizes`: wanted tasks by kind. `settings`: sections, laid over QUICK. All jobs are in partition `low`."""

    def __init__(
        self, cluster: Cluster, folder: Path, sizes: Mapping[str, int], settings: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.cluster, self.folder, self.sizes = cluster, folder, dict(sizes)
        self.line = folder / "line"
        self.line.mkdir()
        jobs = {kind: {**JOB, "jobs": count} for kind, count in sizes.items()}
        # Each node has a disk of its own: who sweeps there, sweeps that node alone.
        setup = [
            f'export ROLLOUT_SANDBOX__ROOT="{folder}/$SLURMD_NODENAME" TMPDIR="{folder}/tmp/$SLURMD_NODENAME"',
            'mkdir -p "$TMPDIR"',
        ]
        slurm = {
            "folder": str(self.line), "partition": "low", "setup": setup, "signal": 15, "overlap": 60.0, "look": 1.0,
            "lock": 5.0, **jobs,
        }  # fmt: skip
        whole = {"slurm": slurm, **{name: dict(values) for name, values in QUICK.items()}}
        for name, values in settings.items():
            whole[name] = {**whole.get(name, {}), **values}
        self.file = folder / "config.yaml"
        self.file.write_text(json.dumps(whole))  # JSON is YAML
        self.config: Config = load(self.file)

    def up(self, seconds: float = 90.0) -> None:
        """Submit all, and wait until each stage has a worker."""
        self.command("up", "--timeout", f"{seconds:g}")

    def down(self) -> None:
        """End all jobs of the line, and wait for it: a task that was only just started may miss its signal, and is
        cancelled after limits.grace and a minute."""
        self.command("down", "--timeout", "150")
        self.cluster.until(lambda: not self.rows(), 10.0, "that no job of the line is left")

    def command(self, *words: str) -> str:
        """`rollout slurm WORDS`; returns what it printed. Raises AssertionError with what it said, when it fails."""
        command = [PROGRAM, "--config", str(self.file), "slurm", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.cluster.env(), cwd=self.folder, timeout=240
        )
        assert done.returncode == 0, f"slurm {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def rows(self, kind: str = "") -> list[Row]:
        """The line's tasks that have not ended, of one kind or of all."""
        return [row for row in self.cluster.rows() if not row.over and kind_of(row) in ([kind] if kind else KINDS)]

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted((self.line / "logs").glob("*"))
        return "\n".join(f"== {file.name}\n{file.read_text('utf-8', 'replace')[-3000:]}" for file in files)


def kind_of(row: Row) -> str:
    """The kind of a job of a line; "" for another job. Its name is LINE-KIND-TAG."""
    return row.name.split("-")[1] if row.name.startswith("rollout-") else ""
