"""What the line itself costs: hops, empty rollouts, rollouts per second, a thousand at once, a page of a million.

    python benchmarks/line.py [--json FILE] [--quick] [--only PART]...

Plain RQ does the same three stages in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from harness import Bench, bench, median, quantile, resident_mb, wait_until, write

from pipeline.client import RolloutClient
from pipeline.envelope import Envelope, Task, encode, encode_compressed, rollout_id
from pipeline.inspect import page
from pipeline.results import Rollout

STAMP = "families:Stamp"
TOKENS_1K = 110  # 9 bytes each
TOKENS_32K = 32_768


def three_workers(line: Bench, slots: int = 32) -> None:
    for stage in ("init", "run", "eval"):
        line.worker(stage, slots)


async def latency(line: Bench, count: int) -> dict[str, float]:
    """One empty rollout at a time through three idle worker processes."""
    three_workers(line)
    hops: list[float] = []
    whole: list[float] = []
    async with RolloutClient(config=line.config) as client:
        await client.enqueue([Task(handler=STAMP)])
        await client.ack(await client.pop(1, timeout=30))
        for _ in range(count):
            began = time.perf_counter()
            await client.enqueue([Task(handler=STAMP)])
            batch = await client.pop(1, timeout=10)
            whole.append((time.perf_counter() - began) * 1e3)
            hops += hop_times(batch[0])
            await client.ack(batch)
    return {
        "hop_p50_ms": median(hops), "hop_p99_ms": quantile(hops, 0.99),
        "e2e_p50_ms": median(whole), "e2e_p99_ms": quantile(whole, 0.99),
    }  # fmt: skip


def hop_times(rollout: Rollout) -> list[float]:
    """ms from a stage's commit being sent (end of its attempt's record) to the next stage's handler being entered."""
    sent = {record["stage"]: record["started"] + record["seconds"] for record in rollout.attempts}
    return [(rollout.parts["run_start"] - sent["init"]) * 1e3, (rollout.parts["eval_start"] - sent["run"]) * 1e3]


async def throughput(line: Bench, count: int, tokens: int) -> tuple[float, float]:
    """Rollouts per second, enqueue to ack, and bytes of a payload in Redis."""
    three_workers(line)
    async with RolloutClient(config=line.config) as client:
        await client.enqueue([Task(handler=STAMP, data={"tokens": tokens})])
        warm = await client.pop(1, timeout=30)
        token = (await client.queue.execute("HGET", client.queue.key("r", warm[0].id), "payload")).decode()
        size = int(await client.queue.execute("STRLEN", client.queue.key("p", warm[0].id, token)))
        await client.ack(warm)
        began = time.perf_counter()

        async def feed() -> None:
            for _ in range(count // 8):
                await client.enqueue([Task(handler=STAMP, data={"tokens": tokens})], samples=8)

        feeder = asyncio.create_task(feed())
        got = 0
        while got < count // 8 * 8:
            batch = await client.pop(min(64, count // 8 * 8 - got), timeout=60)
            got += len(batch)
            await client.ack(batch)
        await feeder
        return got / (time.perf_counter() - began), size


async def sleepers(line: Bench, count: int, seconds: float) -> dict[str, float]:
    """`count` rollouts that sleep in one RUN process."""
    async with RolloutClient(config=line.config) as client:
        await client.enqueue([Task(handler=STAMP, data={"sleep": seconds})], samples=count)
        line.worker("init", 32, "--burst").wait()
        run = line.worker("run", count)
        await until_running(client, "run", count)
        await asyncio.sleep(seconds / 2)
        memory = resident_mb(run.pid)
        line.worker("eval", 32)
        batch = await client.pop(count, timeout=seconds + 60)
        first = min(rollout.parts["run_start"] for rollout in batch)
        last = max(rollout.parts["run_end"] for rollout in batch)
        await client.ack(batch)
    return {"sleepers_rss_mb": memory, "sleepers_efficiency": seconds / (last - first)}


async def until_running(client: RolloutClient, stage: str, count: int) -> None:
    key = client.queue.key("lease", stage)
    for _ in range(1200):
        if int(await client.queue.execute("ZCARD", key)) >= count:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{count} rollouts were not in work in {stage} within 60 s")


PROBE_BYTES = 1000
"""A body that is shorter can only be a probe's."""


class Sink:
    """A server that reads each generate body and drops it, holds the call until `release`, then answers one token.

    A probe, which has one token, is answered at once.
    """

    def __init__(self) -> None:
        self.open = 0
        self.bytes = 0
        self.release = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        size = 0
        async for chunk in request.content.iter_any():
            size += len(chunk)
        self.bytes += size
        if size >= PROBE_BYTES:
            self.open += 1
            await self.release.wait()
        token = {"token_id": 1, "logprob": -0.5, "rank": 1, "top_logprobs": []}
        choice = {
            "index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [1],
            "weight_versions": [{"version": "1", "start": 0, "end": 1}], "logprobs": {"content": [token]},
        }  # fmt: skip
        usage = {"prompt_tokens": 0, "total_tokens": 1, "completion_tokens": 1}
        return web.json_response({"request_id": "x", "usage": usage, "choices": [choice]})


@contextlib.asynccontextmanager
async def sink() -> AsyncIterator[tuple[Sink, str]]:
    served = Sink()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", served.generate)
    app.router.add_get("/health", lambda _: _ok())
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield served, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        served.release.set()
        await runner.cleanup()


async def _ok() -> web.Response:
    return web.Response()


async def loaded(line: Bench, count: int, tokens: int, hold: float) -> dict[str, float]:
    """`count` rollouts in one RUN process that each hold `tokens` tokens and an open HTTP call with those ids."""
    from workers.policy.tokenizer import make

    async with sink() as (served, url), RolloutClient(config=line.config) as client:
        make(line.folder / "tokenizer")
        line.change(policy__url=url, policy__tokenizer=str(line.folder / "tokenizer"), policy__context=tokens + 4096)
        await client.enqueue([Task(handler="families:Holding", data={"tokens": tokens})], samples=count)
        line.worker("init", 32, "--burst").wait()
        run = line.worker("run", count, "--metrics", "9397")
        until = time.monotonic() + 120
        while served.open < count and time.monotonic() < until:
            await asyncio.sleep(0.1)
        opened = served.open
        await asyncio.sleep(hold)
        memory = resident_mb(run.pid)
        text = await asyncio.to_thread(lambda: urllib.request.urlopen("http://127.0.0.1:9397/metrics").read().decode())
        served.release.set()
        line.worker("eval", 32)
        batch = await client.pop(count, timeout=120)
        assert all(rollout.outcome == "scored" for rollout in batch), [r.failure for r in batch if r.failure][:1]
        await client.ack(batch)
    return {"loaded_rss_mb": memory, "loaded_open_calls": opened, "loop_lag_p99_ms": lag_p99(text) * 1e3}


def lag_p99(text: str) -> float:
    """Upper bound of the 99th percentile of the loop lag (s), interpolated in its bucket."""
    buckets: list[tuple[float, float]] = []
    for line in text.splitlines():
        if line.startswith("rollout_loop_lag_seconds_bucket"):
            edge = line.split('le="')[1].split('"')[0]
            buckets.append((float(edge), float(line.rsplit(" ", 1)[1])))
    wanted = buckets[-1][1] * 0.99
    below_edge, below = 0.0, 0.0
    for edge, count in buckets:
        if count >= wanted:
            return below_edge + (edge - below_edge) * (wanted - below) / max(count - below, 1)
        below_edge, below = edge, count
    return float("inf")


async def listing(line: Bench, count: int) -> dict[str, float]:
    """A page of 50 out of `count` waiting rollouts."""
    async with RolloutClient(config=line.config.changed({"line.max_length": 0})) as client:
        task = encode_compressed(Task(handler=STAMP), client.queue.schema)
        for at in range(0, count, 5000):
            group = f"g{at}"
            pairs = [
                (id := rollout_id(group, k), encode(Envelope(id=id, group=group, handler=STAMP), client.queue.schema))
                for k in range(min(5000, count - at))
            ]
            await client.queue.enqueue(group, task, pairs)
        times = []
        for turn in range(60):
            began = time.perf_counter()
            rows = await page(client.queue, "init", "ready", start=(turn * 7919) % (count - 50), count=50)
            times.append((time.perf_counter() - began) * 1e3)
            assert len(rows) == 50
    return {"list50_ms": median(times), "list50_p99_ms": quantile(times, 0.99), "list50_of": count}


async def plain_rq(line: Bench, count: int) -> dict[str, float]:
    """The same three stages as RQ jobs on three SimpleWorkers."""
    import rq_stages
    from rq import Queue

    from pipeline.connection import connect_sync

    client = connect_sync(line.config)
    where = {"ROLLOUT_CONFIG": str(line.file), "PYTHONPATH": str(os.path.dirname(os.path.abspath(__file__)))}
    for stage in ("init", "run", "eval"):
        line.start([sys.executable, "-P", rq_stages.__file__], RQ_STAGE=stage, **where)
    queue = Queue("init", connection=client)
    payload = os.urandom(1000)
    queue.enqueue("rq_stages.stage", "init", payload, result_ttl=0, description="init")
    await asyncio.to_thread(wait_until, lambda: client.llen("rq-done") == 1, 30, "the first RQ chain")
    began = time.perf_counter()
    for _ in range(count):
        queue.enqueue("rq_stages.stage", "init", payload, result_ttl=0, description="init")
    await asyncio.to_thread(wait_until, lambda: client.llen("rq-done") == count + 1, 120, "the RQ chains")
    seconds = time.perf_counter() - began
    return {"rq_rollouts_per_s": count / seconds, "rq_jobs_per_s": 3 * count / seconds}


async def measure(part: str, quick: bool) -> dict[str, Any]:
    with bench() as line:
        if part == "latency":
            return await latency(line, 100 if quick else 500)
        if part == "1k":
            rate, size = await throughput(line, 800 if quick else 6000, TOKENS_1K)
            return {"rollouts_per_s_1k": rate, "payload_1k_bytes": size}
        if part == "32k":
            rate, size = await throughput(line, 200 if quick else 2000, TOKENS_32K)
            return {"rollouts_per_s_32k": rate, "payload_32k_bytes": size, "zstd_ratio": TOKENS_32K * 9 / size}
        if part == "sleepers":
            return await sleepers(line, 100 if quick else 1000, 5.0 if quick else 40.0)
        if part == "loaded":
            return await loaded(line, 50 if quick else 1000, TOKENS_32K, 2.0 if quick else 15.0)
        if part == "listing":
            return await listing(line, 20_000 if quick else 1_000_000)
        return await plain_rq(line, 200 if quick else 1000)


PARTS = ("latency", "1k", "32k", "rq", "sleepers", "loaded", "listing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file, one flat object")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure only this part (repeatable)")
    options = parser.parse_args()
    figures: dict[str, Any] = {"cores": os.cpu_count(), "aof": "everysec"}
    for part in options.only or PARTS:
        sys.stderr.write(f"{part} ...\n")
        figures |= asyncio.run(measure(part, options.quick))
    write(figures, options.json)


if __name__ == "__main__":
    main()
