"""Handlers of the trainer's benchmarks: long trajectories with known tokens, and rollouts whose times are drawn."""

from __future__ import annotations

import asyncio
import math
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.interfaces import AgentHandler, Context

VOCABULARY = 150_000
PROMPT, OBSERVATION = 768, 256
"""Tokens before the first action, and between two."""


def tokens_of(group: int, sample: int, count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Ids and logprobs of one rollout: the same whenever they are asked for, so that a reader can compare every bit.

    Ids are uniform over the vocabulary and logprobs exponential, which zstd can hardly make smaller: the worst case.
    """
    chance = np.random.default_rng((group, sample))
    ids = chance.integers(0, VOCABULARY, count, dtype=np.uint32)
    return ids, -chance.exponential(0.5, count).astype(np.float32)


class Long(AgentHandler):
    """data: {"group": number, "tokens": of the whole trajectory, "turns": actions}; two versions of the weights."""

    async def run(self, ctx: Context) -> None:
        count, turns = int(ctx.task["tokens"]), int(ctx.task["turns"])
        ids, logprobs = tokens_of(int(ctx.task["group"]), ctx.sample, count)
        each = (count - PROMPT + OBSERVATION) // turns - OBSERVATION
        at = 0
        for turn in range(turns):
            seen = PROMPT if turn == 0 else OBSERVATION
            add = ctx.trajectory.observation if turn else ctx.trajectory.prompt
            add(array("I", ids[at : at + seen].tobytes()))
            at += seen
            said = each if turn < turns - 1 else count - at
            self._speak(ctx, ids[at : at + said], logprobs[at : at + said], turn >= turns // 2)
            at += said

    def _speak(self, ctx: Context, ids: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], late: bool) -> None:
        ctx.trajectory.action(
            array("I", ids.tobytes()), array("f", logprobs.tobytes()), [(2 if late else 1, 0, len(ids))],
            finish_reason="stop", started=1.7e9, seconds=3.25, sampling={"temperature": 1.0, "max_tokens": 4096},
        )  # fmt: skip

    async def eval(self, ctx: Context) -> float:
        return float(ctx.sample % 2)


@dataclass(frozen=True, kw_only=True)
class Times:
    """The stated model of times; all that is drawn is log-normal, given by its median and sigma (of the logarithm).

    A rollout has `turns` model calls (rounded, at most `most_turns`) with a tool's time between two. A call's time is
    played by the policy server, as tokens of `per_token` seconds.
    """

    turns: float = 3.5
    turns_sigma: float = 0.8
    most_turns: int = 20
    call: float = 0.25
    call_sigma: float = 0.6
    tool: float = 0.125
    tool_sigma: float = 1.0
    per_token: float = 0.02
    seed: int = 7

    def drawn(self, group: int, sample: int) -> tuple[list[int], list[float]]:
        """Tokens of each call, and seconds of each tool's work: always the same for one rollout."""
        chance = np.random.default_rng((self.seed, group, sample))
        turns = min(self.most_turns, max(1, round(self.turns * math.exp(self.turns_sigma * chance.normal()))))
        calls = self.call * np.exp(self.call_sigma * chance.normal(size=turns))
        tools = self.tool * np.exp(self.tool_sigma * chance.normal(size=turns - 1))
        return np.maximum(1, np.rint(calls / self.per_token)).astype(int).tolist(), tools.tolist()

    def seconds(self, group: int, sample: int) -> tuple[float, float]:
        """(in the policy's slots, in all) of one rollout that never waits."""
        calls, tools = self.drawn(group, sample)
        busy = sum(calls) * self.per_token
        return busy, busy + sum(tools)


class Drawn(AgentHandler):
    """data: {"group": number, "times": fields of Times}: model calls and tools of drawn lengths, and nothing else."""

    async def run(self, ctx: Context) -> None:
        calls, tools = Times(**ctx.task["times"]).drawn(int(ctx.task["group"]), ctx.sample)
        await ctx.policy.ready()
        ctx.trajectory.prompt(ctx.policy.render([{"role": "user", "content": ctx.id}]))
        for turn, tokens in enumerate(calls):
            done = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": tokens})
            ctx.trajectory.action(done.ids, done.logprobs, done.versions, finish_reason=done.finish_reason)
            if turn < len(tools):
                await asyncio.sleep(tools[turn])
                ctx.trajectory.observation(done.ids[:8])

    async def eval(self, ctx: Context) -> float:
        return float(ctx.sample % 2)
