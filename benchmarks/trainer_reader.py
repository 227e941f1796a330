"""The trainer's process of the hand-over: it pops groups, says what that took, compares every bit, and hands all back.

    python benchmarks/trainer_reader.py CONFIG WAY GROUPS

WAY: "async" or "sync" (which client pops), "flat" or "padded" (async, and then one batch of arrays of all of them).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
from trainer_families import tokens_of

from pipeline.adapters.padded import Flat, Padded, flat, padded
from pipeline.adapters.rows import usable_rows
from pipeline.client import RolloutClient
from pipeline.config import Config, load
from pipeline.results import Group
from pipeline.sync_client import SyncRolloutClient

PATIENCE = 60.0


def memory(field: str) -> int:
    """Bytes of resident memory now ("VmRSS") or at most ("VmHWM")."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in rows if row.startswith(field)).split()[1]) * 1024


def forget_peak() -> None:
    """Let the highest memory so far be today's (proc(5), clear_refs): what the imports needed is not the pop's."""
    Path("/proc/self/clear_refs").write_text("5")


class Watch:
    """Time and memory from here on."""

    def __init__(self) -> None:
        forget_peak()
        self._before = memory("VmRSS")
        self._cpu = resource.getrusage(resource.RUSAGE_SELF)
        self._began = time.perf_counter()

    def told(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._began
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        used = cpu.ru_utime + cpu.ru_stime - self._cpu.ru_utime - self._cpu.ru_stime
        return {"seconds": seconds, "cpu": used, "peak": memory("VmHWM") - self._before}


def array_bytes(groups: list[Group]) -> int:
    return sum(
        array.nbytes
        for group in groups for rollout in group.rollouts for sequence in rollout.trajectory.sequences  # type: ignore[union-attr]
        for array in (sequence.token_ids, sequence.loss_mask, sequence.logprobs)
    )  # fmt: skip


def compare(groups: list[Group]) -> int:
    """Rollouts popped; raises where a bit is not what the handler wrote."""
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.trajectory is not None, rollout.failure
            (sequence,) = rollout.trajectory.sequences
            ids, logprobs = tokens_of(int(group.id.removeprefix("g")), rollout.sample, len(sequence))
            assert np.array_equal(sequence.token_ids, ids), rollout.id
            sampled = sequence.loss_mask == 1
            assert np.array_equal(sequence.logprobs[sampled], logprobs[sampled]), rollout.id
            assert not sequence.logprobs[~sampled].any(), rollout.id
    return sum(len(group.rollouts) for group in groups)


def batch_bytes(batch: Flat | Padded) -> int:
    """Of its arrays; `prompts` and `responses` are views of `input_ids`."""
    arrays = [getattr(batch, item.name) for item in fields(batch)] + [
        getattr(batch.facts, item.name) for item in fields(batch.facts)
    ]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray) and array.base is None)


def popped(groups: list[Group], watch: Watch) -> dict[str, Any]:
    told = watch.told()
    size = array_bytes(groups)
    return told | {"bytes": size, "peak_ratio": told["peak"] / size, "rollouts": compare(groups)}


async def by_async(config: Config, count: int) -> dict[str, Any]:
    async with RolloutClient(config=config) as client:
        watch = Watch()
        groups = await client.pop_groups(count, timeout=PATIENCE)
        return popped(groups, watch)


async def batched(config: Config, count: int, way: str) -> dict[str, Any]:
    """Popped, and then one batch of all: the time of both, the peak against the batch's own bytes."""
    async with RolloutClient(config=config) as client:
        watch = Watch()
        groups = await client.pop_groups(count, timeout=PATIENCE)
        rows = usable_rows(groups)
        batch = flat(rows) if way == "flat" else padded(rows, pad=0)
        told = watch.told()
        size = batch_bytes(batch)
        return told | {"bytes": size, "peak_ratio": told["peak"] / size, "rollouts": compare(groups)}


def by_sync(config: Config, count: int) -> dict[str, Any]:
    with SyncRolloutClient(config=config) as client:
        watch = Watch()
        groups = client.pop_groups(count, timeout=PATIENCE)
        return popped(groups, watch)


def main() -> None:
    file, way, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = load(Path(file))
    if way == "sync":
        told = by_sync(config, count)
    else:
        told = asyncio.run(by_async(config, count) if way == "async" else batched(config, count, way))
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
