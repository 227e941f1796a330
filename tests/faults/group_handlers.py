"""Handlers for tests of groups: members of one task that take very different times."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from pipeline.interfaces import AgentHandler, Context


class Uneven(AgentHandler):
    """Samples below `fast` end at once; the others sample 7 tokens and then sleep for `slow` seconds."""

    class Task(BaseModel):
        fast: int = 2
        slow: float = 600.0

    async def run(self, ctx: Context) -> None:
        ctx.trajectory.prompt([1, 2, 3])
        ctx.trajectory.action([5] * 7, [-0.5] * 7, [(0, 0, 7)])
        if ctx.sample >= ctx.task.fast:
            await asyncio.sleep(ctx.task.slow)

    async def eval(self, ctx: Context) -> float:
        return float(ctx.sample % 2)
