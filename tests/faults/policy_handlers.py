"""Handlers whose rollouts are nothing but calls of the policy."""

from __future__ import annotations

import asyncio
from typing import Annotated

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from pipeline.interfaces import AgentHandler, Context

Count = Annotated[int, Field(ge=0)]


class Chat(AgentHandler):
    """So many turns, each after an observation of so many ids."""

    class Task(BaseModel):
        """`prompt`, `observation`: how many ids. `text`: asked instead of a made-up prompt. `stop`: see Leaving."""

        model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

        turns: Count = 1
        prompt: Count = 40
        observation: Count = 8
        max_tokens: Count = 64
        text: str = ""
        stop: str = ""

    async def run(self, ctx: Context) -> None:
        await ctx.policy.ready()
        task = ctx.task
        asked = [{"role": "user", "content": task.text}]
        ctx.trajectory.prompt(ctx.policy.render(asked) if task.text else list(range(100, 100 + task.prompt)))
        for turn in range(1, task.turns + 1):
            done = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": task.max_tokens})
            ctx.trajectory.action(
                done.ids, done.logprobs, done.versions, finish_reason=done.finish_reason, sampling=done.sampling
            )
            if turn < task.turns:
                await self.between(ctx, turn)
                if len(ctx.trajectory.ids) + task.observation >= ctx.policy.context:
                    ctx.trajectory.truncated = "context"
                    return
                ctx.trajectory.observation(list(range(200, 200 + task.observation)))

    async def between(self, ctx: Context, turn: int) -> None:
        """What happens after a turn that is not the last."""

    async def eval(self, ctx: Context) -> float:
        return 1.0 - ctx.sample % 2


class Leaving(Chat):
    """After the first turn of sample 3, when the others have ended, the server at `stop` ends its engine."""

    async def between(self, ctx: Context, turn: int) -> None:
        if ctx.sample == 3:
            await asyncio.sleep(0.5)
            async with aiohttp.ClientSession() as session, session.post(ctx.task.stop, json={"dead": True}) as answer:
                await answer.read()
