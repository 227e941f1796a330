"""What the policy's client costs, how much it holds at once, and what balancing is worth.

    python benchmarks/policy.py [--json FILE] [--quick] [--only PART]...

overhead: a call through the client beside a bare HTTP request of the same bytes, taken in turns. flight: rollouts of
three turns with 8k prompts, all in flight from one RUN process. balance: 256 rollouts x 8 turns on four scripted
servers of 16 slots, one of them five times slower, beside round robin and strict stickiness. hang: as many on a whole
line, and one of four servers hangs while its `/health` says 200.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from harness import Bench, bench, machine, median, quantile, wait_until, write
from line import lag_p99

from pipeline.client import RolloutClient
from pipeline.envelope import Task
from workers.policy import request
from workers.policy.balance import Offer, choose
from workers.policy.client import VllmPolicy
from workers.policy.pool import Pool
from workers.policy.tokenizer import make

SINK = Path(__file__).with_name("sink.py")
METRICS = 9399
FAST, SLOW, SLOTS = 0.02, 0.1, 16
"""Seconds for each token of the fast servers and of the slow one, and calls that each runs at once."""

PROMPT, OBSERVATION = 500, 50


def start_sink(line: Bench, hold: float, tokens: int) -> str:
    """A sink in a process of its own; its URL."""
    port = line.folder / f"sink-{len(line.processes)}"
    line.start([
        sys.executable, "-P", str(SINK), "--port-file", str(port), "--hold", str(hold), "--tokens", str(tokens)
    ])  # fmt: skip
    wait_until(port.exists, 30, "the sink")
    return f"http://127.0.0.1:{port.read_text()}"


async def overhead(line: Bench, prompt: int, out: int, count: int) -> dict[str, float]:
    """ms of a call through the client, of a bare one, and the difference of their medians."""
    url = start_sink(line, 0.0, out)
    policy = VllmPolicy(url, "policy", make(line.folder / "tokenizer"), context=131_072)
    ids = [at % 4000 for at in range(prompt)]
    settings = {"max_tokens": 1024, "temperature": 1.0, "top_p": 1.0}
    about = {"stop_token_ids": list(policy.rendering.stop_ids), **settings}
    body = request.body("generate", "x" * 32, "policy", ids, about, None)
    sent = body if isinstance(body, bytes) else b"".join([part async for part in body])
    whole: list[float] = []
    bare: list[float] = []
    headers = {"Content-Type": "application/json", "X-Request-Id": "x" * 32, "X-Session-ID": "x" * 32}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        for turn in range(count + 20):
            began = time.perf_counter()
            async with session.post(f"{url}{request.PATHS['generate']}", data=sent, headers=headers) as answer:
                await answer.read()
            between = time.perf_counter()
            done = await policy.bound(name=f"r{turn}").generate(ids, settings)
            ended = time.perf_counter()
            assert len(done.ids) == out
            if turn >= 20:
                bare.append((between - began) * 1e3)
                whole.append((ended - between) * 1e3)
    await policy.close()
    return {
        "p50": median(whole) - median(bare), "bare_p50": median(bare), "client_p50": median(whole),
        "client_p99": quantile(whole, 0.99), "bare_p99": quantile(bare, 0.99),
    }  # fmt: skip


async def flight(line: Bench, count: int, tokens: int, hold: float) -> dict[str, Any]:
    """`count` rollouts of three turns in one RUN process; each call is held for about `hold` seconds."""
    url = start_sink(line, hold, 200)
    folder = line.folder / "tokenizer"
    make(folder)
    line.change(policy__url=url, policy__tokenizer=str(folder), policy__context=tokens * 2)
    async with RolloutClient(config=line.config) as client:
        data = {"turns": 3, "prompt": tokens, "observation": 100}
        await client.enqueue([Task(handler="policy_families:Chat", data=data)], samples=count)
        line.worker("init", 32, "--burst").wait()
        line.worker("run", count, "--metrics", str(METRICS))
        line.worker("eval", 32)
        batch = await client.pop(count, timeout=hold * 6 + 240)
        assert all(rollout.outcome == "scored" for rollout in batch), [r.failure for r in batch if r.failure][:1]
        await client.ack(batch)
    text, seen = await asyncio.to_thread(lambda: (fetch(f"http://127.0.0.1:{METRICS}/metrics"), fetch(f"{url}/sink")))
    return {"calls_in_flight": json.loads(seen)["most"], "loop_lag_p99_ms": lag_p99(text) * 1e3}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def start_scripted(line: Bench, *paces: float) -> list[str]:
    """A scripted policy server (nobody's model) for each pace, in processes of their own."""
    folder = line.folder / "tokenizer"
    make(folder)
    urls = []
    for pace in paces:
        port = line.folder / f"port-{len(line.processes)}"
        line.start([
            sys.executable, "-P", "-m", "workers.policy.scripted", "--tokenizer", str(folder), "--port-file", str(port),
            "--latency-per-token", str(pace), "--slots", str(SLOTS),
        ])  # fmt: skip
        urls.append(port)
    for port in urls:
        wait_until(port.exists, 60, "a scripted policy server")
    return [f"http://127.0.0.1:{port.read_text()}" for port in urls]


def round_robin() -> Callable[..., str]:
    turn = itertools.count()

    def next_one(offers: Sequence[Offer], **_: Any) -> str:
        return sorted(offer.id for offer in offers)[next(turn) % len(offers)]

    return next_one


def strictly_sticky() -> Callable[..., str]:
    first = round_robin()

    def same(offers: Sequence[Offer], *, sticky: str = "", **about: Any) -> str:
        return sticky if any(offer.id == sticky for offer in offers) else first(offers, **about)

    return same


async def play(policy: VllmPolicy, name: str, turns: int) -> None:
    """One rollout's calls, each with all that was before it."""
    view, ids = policy.bound(name=name), [hash((name, at)) % 4000 for at in range(PROMPT)]
    for turn in range(turns):
        done = await view.generate(ids, {"max_tokens": 256})
        ids += [*done.ids, *([turn] * OBSERVATION)]


async def balance(line: Bench, rollouts: int, turns: int) -> dict[str, float]:
    """Wall time by the way in which calls are given to servers; the same calls, in the same run."""
    urls = start_scripted(line, FAST, FAST, FAST, SLOW)
    tokens = make(line.folder / "tokenizer")
    seconds: dict[str, float] = {}
    for name, chooser in (("line", choose), ("round_robin", round_robin()), ("sticky", strictly_sticky())):
        policy = VllmPolicy(Pool(urls, model="policy", choose=chooser), "policy", tokens)
        await policy.ready()
        while len(policy.pool.fleet.usable()) < len(urls):
            await asyncio.sleep(0.05)
        began = time.perf_counter()
        await asyncio.gather(*(play(policy, f"{name}-{at}", turns) for at in range(rollouts)))
        seconds[name] = time.perf_counter() - began
        await policy.close()
    return {
        "balanced_s": seconds["line"], "round_robin_s": seconds["round_robin"], "strictly_sticky_s": seconds["sticky"],
        "speedup_over_round_robin": seconds["round_robin"] / seconds["line"],
        "speedup_over_strict_stickiness": seconds["sticky"] / seconds["line"],
    }  # fmt: skip


async def hang(line: Bench, rollouts: int, turns: int) -> dict[str, Any]:
    """A whole line with four servers, one of which stops to answer while calls are in flight there."""
    urls = start_scripted(line, FAST, FAST, FAST, FAST)
    folder = str(line.folder / "tokenizer")
    line.change(policy__url=",".join(urls), policy__tokenizer=folder)
    line.worker("init", 32)
    line.worker("run", rollouts)
    line.worker("eval", 8)
    async with RolloutClient(config=line.config) as client:
        data = {"turns": turns, "prompt": PROMPT, "observation": OBSERVATION}
        await client.enqueue([Task(handler="policy_families:Chat", data=data)], samples=rollouts)
        await asyncio.to_thread(wait_until, lambda: running(urls[0]) >= SLOTS, 120, "the server's slots are full")
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{urls[0]}/scripted/state", json={"hang": True}) as answer:
                await answer.read()
            async with session.get(f"{urls[0]}/health") as answer:
                assert answer.status == 200
        batch = await client.pop(rollouts, timeout=600)
        await client.ack(batch)
    outcomes = [rollout.outcome for rollout in batch]
    again = sum(sum(record["stage"] == "run" for record in rollout.attempts) - 1 for rollout in batch)
    return {
        "hung_backend_rollouts": len(batch), "hung_backend_failed_rollouts": outcomes.count("failed"),
        "hung_backend_attempts_lost": again,
    }  # fmt: skip


def running(url: str) -> int:
    rows = fetch(f"{url}/metrics").splitlines()
    return int(float(next(row for row in rows if row.startswith("vllm:num_requests_running")).rsplit(" ", 1)[1]))


async def measure(part: str, quick: bool) -> dict[str, Any]:
    with bench() as line:
        if part == "overhead":
            short = await overhead(line, 1000, 100, 50 if quick else 500)
            long = await overhead(line, 32_000, 500, 20 if quick else 200)
            return {f"overhead_1k_{name}_ms": value for name, value in short.items()} | {
                f"overhead_32k_{name}_ms": value for name, value in long.items()
            }
        if part == "flight":
            return await flight(line, 50 if quick else 1000, 8192, 2.0 if quick else 20.0)
        if part == "balance":
            return await balance(line, 64 if quick else 256, 2 if quick else 8)
        return await hang(line, 64 if quick else 256, 2 if quick else 8)


PARTS = ("overhead", "flight", "balance", "hang")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file, one flat object")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure only this part (repeatable)")
    options = parser.parse_args()
    figures: dict[str, Any] = machine()
    for part in options.only or PARTS:
        sys.stderr.write(f"{part} ...\n")
        figures |= asyncio.run(measure(part, options.quick))
    write(figures, options.json)


if __name__ == "__main__":
    main()
