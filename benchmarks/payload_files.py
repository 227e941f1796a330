"""What payloads in files cost and save: 64 trajectories of about 1 MB (compressed), in Redis and in files.

    python benchmarks/payload_files.py [--json FILE] [--short] [--dir FOLDER]

For each place, on a line of its own: Redis's memory with all of them done; how long one write takes; how long a fresh
trainer's process takes to pop them as numpy arrays; how long an ack of all of them takes. `--dir`: where the files lie
(name the shared file system); else a temporary folder on this machine's disk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from harness import Bench, bench, machine, median, quantile, write
from trainer_handover import SAMPLES, fill, read

from pipeline.client import RolloutClient

BYTES = 7
"""Of a token in a compressed payload: its id, logprob and mask."""


async def figures_of(line: Bench, groups: int, tokens: int, times: int) -> dict[str, float]:
    """Figures of one place."""
    async with RolloutClient(config=line.config) as client:
        before, _ = await client.queue.memory()
    await fill(line, groups, tokens, 24)
    async with RolloutClient(config=line.config) as client:
        after, _ = await client.queue.memory()
        writes = await _writes(client, tokens, 5 * times)
    runs = [read(line, "async", groups) for _ in range(times)]
    return {
        "memory_mb": (after - before) / 1e6, "write_ms_p50": 1000 * median(writes),
        "write_ms_p99": 1000 * quantile(writes, 0.99), "pop_s": min(run["seconds"] for run in runs),
        "pop_median_s": median([run["seconds"] for run in runs]), "pop_cpu_s": min(run["cpu"] for run in runs),
        "pop_peak_ratio": max(run["peak_ratio"] for run in runs), "ack_s": await _ack(line, groups),
    }  # fmt: skip


async def _writes(client: RolloutClient, tokens: int, count: int) -> list[float]:
    """Seconds of each of `count` writes of a payload of this size, one after another; they expire."""
    data, spent = os.urandom(BYTES * tokens), []
    for number in range(count):
        began = time.perf_counter()
        await client.queue.write_payload(f"w.{number}", "t", data, 60)
        spent.append(time.perf_counter() - began)
    return spent


async def _ack(line: Bench, groups: int) -> float:
    async with RolloutClient(config=line.config) as client:
        popped = await client.pop_groups(groups, timeout=60)
        began = time.perf_counter()
        await client.ack(popped)
        return time.perf_counter() - began


async def measure(folder: str, short: bool) -> dict[str, Any]:
    groups, tokens, times = (1, 16_384, 1) if short else (8, 147_456, 5)
    figures: dict[str, Any] = {"rollouts": groups * SAMPLES, "tokens": tokens}
    for place in ("redis", "files"):
        with bench() as line, tempfile.TemporaryDirectory(prefix="payloads-", dir=folder or None) as shared:
            line.change(payload__dir=shared if place == "files" else "", payload__inline_max=16 * 1024)
            found = await figures_of(line, groups, tokens, times)
        figures |= {f"{place}_{name}": value for name, value in found.items()}
    return figures | {"folder": folder or tempfile.gettempdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--short", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--dir", default="", metavar="FOLDER", help="where the files lie")
    chosen = parser.parse_args()
    write(machine() | asyncio.run(measure(chosen.dir, chosen.short)), chosen.json)


if __name__ == "__main__":
    main()
