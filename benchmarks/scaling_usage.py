"""Who uses the processors in the scaling benchmark: the whole machine, and each kind of the line's processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.slurm.cluster import Cluster


class Usage:
    """CPU seconds of this machine and of the processes of the line, between two looks."""

    def __init__(self, cluster: Cluster, redis: int) -> None:
        self._cluster, self._redis = cluster, redis
        self._began, self._busy, self._by_kind = time.monotonic(), _busy(), self._look()

    def _look(self) -> Counter[str]:
        """CPU seconds by kind so far. `sandboxes`: what INIT workers started, and those that ended with all in them."""
        found: Counter[str] = Counter()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                kind = self._kind(process)
                spent = process.cpu_times()
                found[kind] += spent.user + spent.system
                if kind == "init":
                    found["sandboxes"] += spent.children_user + spent.children_system
                    for child in process.children(recursive=True):
                        with contextlib.suppress(psutil.Error):
                            found["sandboxes"] += sum(child.cpu_times()[:4])
        return found

    def _kind(self, process: psutil.Process) -> str:
        """Which of the line's processes it is; empty for others, and for those that a worker forked."""
        command = process.cmdline()
        if process.pid in (os.getpid(), self._redis):
            return "redis" if process.pid == self._redis else "trainer"
        if any(word.endswith("sink.py") for word in command):
            return "model"
        if process.environ().get("SLURM_CONF") != self._cluster.conf or not command:
            return ""
        if Path(command[0]).name.startswith(("slurm", "munged")):
            return "slurm"
        works = "workers.cli" in command and "work" in command[:-1] and not self._is_fork(process)
        return command[command.index("work") + 1] if works else ""

    def _is_fork(self, process: psutil.Process) -> bool:
        parent = process.parent()
        return parent is not None and parent.cmdline() == process.cmdline()

    def cores(self) -> dict[str, float]:
        """Cores in use by kind of process; `other`: whatever else runs on this machine."""
        seconds = time.monotonic() - self._began
        now = self._look()
        found = {kind: max(0.0, now[kind] - self._by_kind[kind]) / seconds for kind in sorted(now) if kind}
        found["other"] = (_busy() - self._busy) / seconds - sum(found.values())
        return found

    def share(self) -> float:
        return (_busy() - self._busy) / (time.monotonic() - self._began) / (os.cpu_count() or 1)


def _busy() -> float:
    """CPU seconds of this machine so far, whoever used them."""
    spent = psutil.cpu_times()
    return float(sum(spent[:8]) - spent.idle - spent.iowait)
