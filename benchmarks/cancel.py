"""From a cancel until the model call is aborted and the rollout's record is written, its slot free.

    python benchmarks/cancel.py [--json FILE] [--count 1000]

Rollouts flow through three workers against the scripted policy, whose calls take a while; each rollout is cancelled at
a random moment of the run, so some wait, some are in a call, and some are over. All counters must agree at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
import urllib.request
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from harness import Bench, bench, median, quantile, wait_until, write

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.inspect import counts
from workers.policy.tokenizer import make

SLOTS = 500
LATENCY = 8.0
SPREAD = 20.0


def start_policy(line: Bench) -> str:
    """The scripted policy (nobody's model) as a process of its own; every call takes LATENCY seconds."""
    folder = line.folder / "tokenizer"
    make(folder)
    port = line.folder / "port"
    command = [
        sys.executable,
        "-P",
        "-m",
        "workers.policy.scripted",
        "--tokenizer",
        str(folder),
        "--port-file",
        str(port),
    ]
    line.start([*command, "--latency", str(LATENCY)])
    wait_until(port.exists, 30, "the scripted policy")
    url = f"http://127.0.0.1:{port.read_text().strip()}"
    line.change(policy__url=url, policy__tokenizer=str(folder))
    return url


async def cancel_one(client: RolloutClient, id: str, delay: float) -> tuple[str, float]:
    """Cancel after `delay` s; what the line said, and the seconds until the record was there."""
    await asyncio.sleep(delay)
    began = time.perf_counter()
    said = (await client.cancel([id]))[id]
    while not await client.queue.execute("HGET", client.queue.key("r", id), "outcome"):
        await asyncio.sleep(0.005)
    return said, time.perf_counter() - began


async def measure(line: Bench, count: int) -> dict[str, Any]:
    url = start_policy(line)
    line.worker("init", 32)
    line.worker("run", SLOTS)
    line.worker("eval", 8)
    chance = random.Random(7)
    async with RolloutClient(config=line.config) as client:
        tasks = [Task(handler="families:Calling") for _ in range(count)]
        ids = await client.enqueue(tasks)
        answers = await asyncio.gather(*(cancel_one(client, id, chance.uniform(0, SPREAD)) for id in ids))
        seconds = [took for said, took in answers if said == "ASKED"]
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/metrics").read().decode())
        running = next(row for row in text.splitlines() if row.startswith("vllm:num_requests_running"))
        batch = await client.pop(count, timeout=120)
        outcomes = [rollout.outcome for rollout in batch]
        await client.ack(batch)
        numbers = await counts(client.queue)
        findings = await audit(client.queue)
    said = [word for word, _ in answers]
    exact = (
        numbers["enqueued"] == numbers["acked"] == count
        and numbers.get("live", 0) == 0
        and numbers.get("cancelled", 0) == outcomes.count("cancelled")
        and numbers.get("scored", 0) == outcomes.count("scored")
        and outcomes.count("cancelled") + outcomes.count("scored") == count
    )
    return {
        "cancels": count,
        "asked": said.count("ASKED"),
        "removed": said.count("REMOVED"),
        "too_late": said.count("DONE"),
        "cancel_p50_ms": median(seconds) * 1e3,
        "cancel_p99_ms": quantile(seconds, 0.99) * 1e3,
        "cancel_max_ms": max(seconds) * 1e3,
        "cancelled": outcomes.count("cancelled"),
        "scored": outcomes.count("scored"),
        "calls_left_running": int(float(running.rsplit(" ", 1)[1])),
        "counters_exact": exact,
        "audit_findings": len(findings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file, one flat object")
    parser.add_argument("--count", type=int, default=1000, help="rollouts, each cancelled once")
    options = parser.parse_args()
    with bench() as line:
        write(asyncio.run(measure(line, options.count)), options.json)


if __name__ == "__main__":
    main()
