"""One rank of a trainer of two processes: `ranks.py RANK FOLDER CASE`. Prints what `on_rank_zero` gave it, as JSON.

CASE: "result" (a group with arrays, after a wait), "error" (Incomplete on rank 0), "unsendable", "dies" (rank 0 is
killed while it fetches), "other dies" and "other is late" (rank 1, before it asks).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipeline.adapters.distributed import on_rank_zero, shard
from pipeline.builder import TrajectoryBuilder
from pipeline.errors import Incomplete, LineError
from pipeline.results import Group, Rollout

WAIT = 2.5
"""Seconds that rank 0 fetches: longer than the process group's time-out."""


def group(name: str, tokens: int) -> Group:
    builder = TrajectoryBuilder()
    builder.prompt([1, 2])
    builder.action(list(range(tokens)), [-0.5] * tokens, [(0, 0, tokens)], finish_reason="stop")
    rollout = Rollout(
        id=f"{name}.0", group=name, sample=0, samples=1, lane="train", outcome="scored", reward=1.0,
        trajectory=builder.build(),
    )  # fmt: skip
    return Group(name, (rollout,), wanted=1)


def fetch(case: str) -> object:
    assert dist.get_rank() == 0, "only rank 0 pops"
    if case in ("result", "other dies", "other is late"):
        time.sleep(WAIT)
        return [group("a", 8), group("b", 4), group("c", 4)]
    if case == "error":
        raise Incomplete("7 of 8 groups came within 5 s", batch=[], wanted=8, got=7, missing={"s-0-7.0": "in work"})
    if case == "unsendable":
        return threading.Lock()
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def main(rank: int, folder: str, case: str) -> dict[str, object]:
    dist.init_process_group(
        "gloo", init_method=(Path(folder) / "meeting").as_uri(), rank=rank, world_size=2, timeout=timedelta(seconds=2)
    )
    began = time.monotonic()
    if rank == 1 and case == "other dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and case == "other is late":
        time.sleep(WAIT + 3.0)
    try:
        found = on_rank_zero(lambda: fetch(case), word_every=0.5)
    except LineError as error:
        return {
            "raised": type(error).__name__, "says": str(error), "missing": getattr(error, "missing", None),
            "seconds": time.monotonic() - began,
        }  # fmt: skip
    assert isinstance(found, list)
    mine = shard(found, rank, 2)
    return {
        "groups": [item.id for item in found],
        "mine": [item.id for item in mine],
        "ids": [item.rollouts[0].trajectory.sequences[0].token_ids.tolist() for item in found],
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])), flush=True)  # noqa: T201
    os._exit(0)
