"""Jobs near their limit are replaced before they go, Redis too, and the line goes on. The overlap makes times short."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.test_commands import ROLLOUT, alive, rollout, settings, told
from tests.waiting import until

KINDS = ("redis", "init", "run", "eval", "maint")


def running(cluster: Cluster) -> set[str]:
    return {row.id for row in cluster.rows() if row.state == "RUNNING" and row.name.startswith("small-")}


def enqueue(line: Path, group: str, count: int) -> None:
    rows = "".join(
        json.dumps({"id": f"{group}{n}", "handler": "echo", "data": {"text": "x", "sleep": 1.0}}) + "\n"
        for n in range(count)
    )
    (line / "tasks.jsonl").write_text(rows)
    rollout(line, "enqueue", "tasks.jsonl")


def popped(line: Path) -> Callable[[], set[str]]:
    """Pops what there is, each time it is called; the ids so far. Raises AssertionError for one that comes twice."""
    ids: set[str] = set()

    def more() -> set[str]:
        for text in rollout(line, "pop", "--all").stdout.splitlines():
            rollout_ = json.loads(text)
            assert rollout_["id"] not in ids
            assert rollout_["outcome"] == "scored", rollout_
            ids.add(rollout_["id"])
        return ids

    return more


def test_every_kind_is_replaced_before_its_end_and_the_line_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    line = settings(tmp_path)
    rollout(line, "slurm", "up")
    first, more = running(cluster), popped(line)
    enqueue(line, "a", 5)

    # From now on a task of 20 minutes counts as near its end once it has run for 10 s.
    rollout(line, "slurm", "up", "--set", "slurm.overlap=1190.0")
    until(lambda: all(set(alive(cluster, kind)) - first for kind in KINDS), 90)
    assert first <= running(cluster)  # they go on, side by side
    until(lambda: {id for id in alive(cluster) if id not in first} <= running(cluster), 60)
    status = told(line, "slurm", "status")
    assert sum(item["ending"] for item in status["kinds"].values()) >= len(first)

    # With the usual overlap all of them count, so there are too many: those that would end soonest go. Redis moves.
    rollout(line, "slurm", "up")
    until(lambda: not first & set(alive(cluster)), 120)
    until(lambda: len(alive(cluster)) == len(first), 120)
    address = json.loads((line / "line" / "address.json").read_text())
    assert address["epoch"] > 1
    enqueue(line, "b", 5)
    until(lambda: len(more()) == 10, 60)
    assert not more() - {f"{group}{n}.0" for group in "ab" for n in range(5)}
    assert rollout(line, "audit").stdout == "the line is sound\n"
    rollout(line, "slurm", "down")
    assert alive(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_the_limits_of_all_its_jobs(cluster: Cluster, tmp_path: Path) -> None:
    """Limits of 4 minutes, for 9 minutes: no stage is ever without a worker, and Redis moves with its data."""
    kinds = {kind: {"time": "4:00", "jobs": 1} for kind in KINDS}
    line = settings(tmp_path, overlap=120.0, **kinds)
    rollout(line, "slurm", "up")
    began, more, number, away = time.monotonic(), popped(line), 0, 0.0
    seen: set[str] = set()
    while time.monotonic() - began < 540:
        status = told(line, "slurm", "status")
        seen |= {task["id"] for task in status["tasks"]}
        if status["redis"]:  # on its way to its next job
            away = away or time.monotonic()
            assert time.monotonic() - away < 60, status
            continue
        away = 0.0
        idle = [stage for stage in ("init", "run", "eval") if not status["kinds"][stage]["workers"]]
        assert not idle, status
        enqueue(line, f"t{number}-", 3)
        number += 1
        more()
    until(lambda: len(more()) == 3 * number, 120)
    assert json.loads((line / "line" / "address.json").read_text())["epoch"] >= 3
    assert len(seen) >= 3 * len(KINDS)
    assert rollout(line, "audit").stdout == "the line is sound\n"
    rollout(line, "slurm", "down")
    assert alive(cluster) == []


def test_a_keeper_on_a_login_node_replaces_what_went(cluster: Cluster, tmp_path: Path) -> None:
    """Also the maint task, and also while Redis is away: the keeper does without it."""
    few = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
    line = settings(tmp_path, setup=["exec sleep 600"], **few)
    rollout(line, "slurm", "up", "--timeout", "0", code=1)
    first = set(alive(cluster))
    keeper = subprocess.Popen([ROLLOUT, "slurm", "keep"], cwd=line, stderr=subprocess.PIPE, text=True)
    try:
        cluster.cancel(sorted(first)[0])
        until(lambda: len(alive(cluster)) == 3 and set(alive(cluster)) - first != set(), 60)
    finally:
        keeper.send_signal(signal.SIGTERM)
        _, said = keeper.communicate(timeout=30)
    assert keeper.returncode == 0
    assert "1 task submitted" in said
    rollout(line, "slurm", "down")
