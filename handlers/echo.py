"""The smallest handler: no policy, no sandbox. It waits, says its text, and carries tokens that name its rollout.

Tests and benchmarks use it: `signature` tells which rollout a trajectory belongs to.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.interfaces import AgentHandler, Context

SIGNED = 8
"""How many tokens at the front of the trajectory are the rollout's signature."""

VOCABULARY = 150_000


class Echo(AgentHandler):
    """Scores 1.0, always."""

    class Task(BaseModel):
        """`text` comes back as the answer; `sleep` is in seconds; `tokens` is the length of the made-up trajectory."""

        model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

        text: str = ""
        sleep: Annotated[float, Field(ge=0, le=86_400)] = 0.0
        tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0

    async def run(self, ctx: Context) -> None:
        if ctx.task.sleep:
            await asyncio.sleep(ctx.task.sleep)
        if ctx.task.tokens:
            _speak(ctx, ctx.task.tokens)
        ctx.state["answer"] = ctx.task.text

    async def eval(self, ctx: Context) -> float:
        return 1.0

    def gold(self, task: Echo.Task) -> str:
        return task.text


def signature(rollout_id: str) -> tuple[int, ...]:
    """The first tokens of this rollout's trajectory, where it is long enough: 8 ids below 150,000."""
    words = np.frombuffer(hashlib.sha256(rollout_id.encode()).digest(), dtype="<u4")
    return tuple(int(word) % VOCABULARY for word in words)


def _speak(ctx: Context, count: int) -> None:
    """A prompt of an eighth of `count` tokens that starts with the signature, and one action of the rest.

    Values are spread evenly, so that they compress no better than a real trajectory does.
    """
    signed = signature(ctx.id)
    prompt = min(count, max(SIGNED, count // 8))
    spread = np.random.default_rng(signed)
    ids = array("I", spread.integers(0, VOCABULARY, count, dtype=np.uint32).tobytes())
    ids[: min(SIGNED, prompt)] = array("I", signed[:prompt])
    ctx.trajectory.prompt(ids[:prompt])
    sampled = count - prompt
    if sampled:
        logprobs = array("f", (-spread.random(sampled, dtype=np.float32)).tobytes())
        ctx.trajectory.action(ids[prompt:], logprobs, [(0, 0, sampled)], finish_reason="stop")
