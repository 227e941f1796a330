"""Handlers of the benchmarks: they stamp times into the rollout, or hold a long trajectory and an open model call."""

from __future__ import annotations

import asyncio
import time
from array import array
from functools import lru_cache

import numpy as np

from pipeline.interfaces import AgentHandler, Context, Reward

VOCABULARY = 150_000


class Stamp(AgentHandler):
    """Stamps (Unix time) when each stage is entered and left; data: {"sleep": seconds in run, "tokens": count}."""

    async def init(self, ctx: Context) -> None:
        ctx.state["init_end"] = time.time()

    async def run(self, ctx: Context) -> None:
        ctx.state["run_start"] = time.time()
        if ctx.task.get("tokens"):
            speak(ctx, int(ctx.task["tokens"]))
        if ctx.task.get("sleep"):
            await asyncio.sleep(float(ctx.task["sleep"]))
        ctx.state["run_end"] = time.time()

    async def eval(self, ctx: Context) -> Reward:
        entered = time.time()
        stamps = {key: float(value) for key, value in ctx.state.items()}
        return Reward(value=1.0, parts={**stamps, "eval_start": entered})


class Holding(AgentHandler):
    """Holds a trajectory of `tokens` tokens and one open model call with exactly those ids."""

    async def run(self, ctx: Context) -> None:
        ids = np.random.default_rng(ctx.sample).integers(0, VOCABULARY, int(ctx.task["tokens"]), dtype=np.uint32)
        ctx.trajectory.prompt(array("I", ids.tobytes()))
        del ids
        reply = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": 1})
        ctx.trajectory.action(reply.ids, reply.logprobs, reply.versions, finish_reason=reply.finish_reason)

    async def eval(self, ctx: Context) -> float:
        return 1.0


@lru_cache(maxsize=4)
def _speech(count: int) -> tuple[array[int], array[float]]:
    """Made once a process: the benchmark measures the line, not the making of tokens. Ids repeat as real text does,
    logprobs do not: zstd gains less than 3x."""
    chance = np.random.default_rng(count)
    ids = array("I", (chance.zipf(1.3, count) % VOCABULARY).astype(np.uint32).tobytes())
    logprobs = array("f", (-chance.exponential(0.5, count - count // 2)).astype(np.float32).tobytes())
    return ids, logprobs


def speak(ctx: Context, count: int) -> None:
    """Half prompt, half action."""
    ids, logprobs = _speech(count)
    half = count // 2
    ctx.trajectory.prompt(ids[:half])
    ctx.trajectory.action(ids[half:], logprobs, [(0, 0, count - half)], finish_reason="stop")


class Calling(AgentHandler):
    """One model call, after a prompt that says which rollout it is."""

    async def run(self, ctx: Context) -> None:
        ctx.trajectory.prompt(ctx.policy.render([{"role": "user", "content": ctx.id}]))
        reply = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": 64})
        ctx.trajectory.action(reply.ids, reply.logprobs, reply.versions, finish_reason=reply.finish_reason)

    async def eval(self, ctx: Context) -> float:
        return 1.0
