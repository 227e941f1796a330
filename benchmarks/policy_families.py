"""Handler of the policy benchmark: turns of nothing but model calls, over prompts of a given length."""

from __future__ import annotations

from array import array

import numpy as np

from pipeline.interfaces import AgentHandler, Context

KNOWN = 4000
"""Ids that the benchmark's tokenizer has."""


class Chat(AgentHandler):
    """data: {"turns": n, "prompt": ids at the beginning, "observation": ids between two turns}."""

    async def run(self, ctx: Context) -> None:
        await ctx.policy.ready()
        chance = np.random.default_rng(ctx.sample)

        def drawn(count: int) -> array[int]:
            return array("I", chance.integers(0, KNOWN, count, dtype=np.uint32).tobytes())

        ctx.trajectory.prompt(drawn(int(ctx.task["prompt"])))
        for turn in range(int(ctx.task["turns"])):
            if turn:
                ctx.trajectory.observation(drawn(int(ctx.task["observation"])))
            done = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": 256})
            ctx.trajectory.action(done.ids, done.logprobs, done.versions, finish_reason=done.finish_reason)

    async def eval(self, ctx: Context) -> float:
        return 1.0
