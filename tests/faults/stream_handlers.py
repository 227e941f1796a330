"""Handlers whose rewards a test chooses, for tests of what a trainer keeps of its groups."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from handlers.echo import Echo
from pipeline.interfaces import Context


class Valued(Echo):
    """Sample k is scored `rewards[k]`, the last one of them for all further samples, after `slow` s for sample 0; below
    0 it fails."""

    class Task(Echo.Task):
        rewards: list[float]
        slow: Annotated[float, Field(ge=0)] = 0.0

    async def run(self, ctx: Context) -> None:
        if ctx.sample == 0 and ctx.task.slow:
            await asyncio.sleep(ctx.task.slow)
        await super().run(ctx)

    async def eval(self, ctx: Context) -> float:
        reward: float = ctx.task.rewards[min(ctx.sample, len(ctx.task.rewards) - 1)]
        if reward < 0:
            raise ValueError("this one is to fail")
        return reward
