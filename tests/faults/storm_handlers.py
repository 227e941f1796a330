"""A handler for storms of the policy: turns whose every action knows when it was asked for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from pipeline.interfaces import AgentHandler, Context


class Talk(AgentHandler):
    """So many turns; a reply that an update broke off is gone on with."""

    class Task(BaseModel):
        """`turns`: how many."""

        model_config = ConfigDict(frozen=True)

        turns: int = 3

    async def run(self, ctx: Context) -> None:
        await ctx.policy.ready()
        trajectory = ctx.trajectory
        trajectory.prompt(list(range(100, 140)))
        for turn in range(ctx.task.turns):
            if turn:
                trajectory.observation(list(range(200, 208)))
            left, reason = 64, "abort"
            while reason == "abort" and left > 0:
                done = await ctx.policy.generate(trajectory.ids, {"max_tokens": left})
                reason, left = done.finish_reason, left - len(done.ids)
                if done.ids:
                    trajectory.action(
                        done.ids, done.logprobs, done.versions, finish_reason=reason, sampling=done.sampling,
                        started=done.started, seconds=done.seconds,
                    )  # fmt: skip

    async def eval(self, ctx: Context) -> float:
        return 1.0
