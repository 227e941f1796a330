"""What goes wrong on a cluster, done on purpose to a test's Slurm: one bad thing after the other, by a seed."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

import psutil

from tests.slurm.cluster import Cluster
from tests.slurm.line_jobs import LineJobs, kind_of

DECK = ("down", "kill-node", "kill-slurmd", "preempt", "requeue", "cancel", "requeue", "cancel", "redis", "freeze")
AWAY = (3.0, 8.0)
"""Seconds for which a node is away, at least and at most."""

NO_REDIS = 12.0
"""Seconds for which there is no server when its job goes to another node, at least."""


FROZEN = (5.0, 7.0)
"""Seconds for which a worker stands still: longer than a lease, so it comes back to what is not its own any more."""


class Chaos:
    """Blow by blow: `step` does one bad thing, `mend` brings back what has been away for its time.

    Each of the deck comes once before any comes again. At most `most_away` nodes are away at once. What ends is
    submitted again by the line's own keepers, not from here.
    """

    def __init__(self, cluster: Cluster, jobs: LineJobs, seed: int, *, most_away: int = 1) -> None:
        self.cluster, self.jobs, self.most_away = cluster, jobs, most_away
        self.seed, self.chance = seed, random.Random(seed)
        self.deck: list[str] = []
        self.away: dict[str, float] = {}
        self.held: dict[str, float] = {}
        self.frozen: dict[psutil.Process, float] = {}
        self.did: list[str] = []

    def step(self) -> None:
        """One bad thing."""
        if not self.deck:
            self.deck = list(DECK)
            self.chance.shuffle(self.deck)
        what = self.deck.pop()
        deeds: dict[str, Callable[[], str]] = {
            "down": lambda: self._lose(self.cluster.down_node), "kill-node": lambda: self._lose(self.cluster.kill_node),
            "kill-slurmd": lambda: self._lose(self.cluster.kill_slurmd), "preempt": self._preempt,
            "requeue": lambda: self._task(self.cluster.requeue), "cancel": lambda: self._task(self.cluster.cancel),
            "redis": self._redis, "freeze": self._freeze,
        }  # fmt: skip
        self.did.append(f"{what} {deeds[what]()}")

    def mend(self, *, all_: bool = False) -> None:
        """Bring back nodes and jobs whose time is up, or all of them."""
        for node, until in list(self.away.items()):
            if all_ or time.monotonic() >= until:
                self.cluster.start_node(node)
                del self.away[node]
        for job, until in list(self.held.items()):
            if all_ or time.monotonic() >= until:
                self.cluster.call("scontrol", "release", job)
                del self.held[job]
        for process, until in list(self.frozen.items()):
            if all_ or time.monotonic() >= until:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
                del self.frozen[process]

    def _present(self) -> list[str]:
        return [node for node in self.cluster.nodes if node not in self.away]

    def _lose(self, how: Callable[[str], None]) -> str:
        """A node on which the line has jobs, rather than one without."""
        if len(self.away) >= self.most_away:
            first = min(self.away, key=lambda node: self.away[node])
            self.away[first] = 0.0
            self.mend()
        busy = {row.node for row in self.jobs.rows()}
        node = self.chance.choice([node for node in self._present() if node in busy] or self._present())
        how(node)
        self.away[node] = time.monotonic() + self.chance.uniform(*AWAY)
        return node

    def _preempt(self) -> str:
        node = self.chance.choice(self._present())
        self.cluster.preempt(node, self.chance.uniform(1.0, 4.0))
        return node

    def _task(self, how: Callable[[str], None]) -> str:
        """Any task but that of Redis, which has a deed of its own."""
        running = [row for row in self.jobs.rows() if row.state == "RUNNING" and kind_of(row) != "redis"]
        if not running:
            return "(none runs)"
        row = self.chance.choice(running)
        how(row.id)
        return f"{kind_of(row)} {row.id} on {row.node}"

    def _freeze(self) -> str:
        """All processes of one RUN task stand still for a while, as on a machine that hangs."""
        running = [row for row in self.jobs.rows("run") if row.state == "RUNNING"]
        if not running:
            return "(none runs)"
        row, until = self.chance.choice(running), time.monotonic() + self.chance.uniform(*FROZEN)
        for process in self.cluster.processes(row.node):
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if row.id == f"{environ.get('SLURM_ARRAY_JOB_ID')}_{environ.get('SLURM_ARRAY_TASK_ID')}":
                    process.suspend()
                    self.frozen[process] = until
        return f"{row.id} on {row.node}"

    def _redis(self) -> str:
        """The job of Redis is requeued, waits, and runs again on another node."""
        running = [row for row in self.jobs.rows("redis") if row.state == "RUNNING"]
        if not running:
            return "(none runs)"
        job, node = running[0].id, running[0].node
        self.cluster.call("scontrol", "requeuehold", job)
        self.cluster.until(lambda: self.jobs.rows("redis")[0].state == "PENDING", 20.0, "that the job of Redis waits")
        self.cluster.call("scontrol", "update", f"JobId={job}", f"ExcNodeList={node}")
        self.held[job] = time.monotonic() + NO_REDIS
        return f"{job} on {node}"
