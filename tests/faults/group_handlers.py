"""Handlers for tests of groups: members of one task that take very different times."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

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


class Busy(AgentHandler):
    """Of its samples, 0 ends when the file `go` is there, 1 waits for a long reply, and 2 for a command."""

    class Task(BaseModel):
        go: str
        sleep: str

    sandbox: ClassVar[dict[str, Any] | None] = {}

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        await ctx.policy.ready()
        ctx.trajectory.prompt(list(range(100, 140)))
        await self._call(ctx, 4)
        if ctx.sample == 1:
            await self._call(ctx, 4000)
        if ctx.sample == 2:
            await ctx.sandbox.bash(f"sleep {ctx.task.sleep}")
        while ctx.sample == 0 and not Path(ctx.task.go).exists():
            await asyncio.sleep(0.02)

    async def _call(self, ctx: Context, most: int) -> None:
        done = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": most})
        ctx.trajectory.action(done.ids, done.logprobs, done.versions, finish_reason=done.finish_reason)

    async def eval(self, ctx: Context) -> float:
        return 1.0
