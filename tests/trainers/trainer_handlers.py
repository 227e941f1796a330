"""Handlers that the workers of these tests load by name (`trainer_handlers:Talks`)."""

from __future__ import annotations

from pydantic import BaseModel

from handlers.turns import Talk, Turns
from pipeline.errors import TaskError
from pipeline.interfaces import Context


class Talks(Turns):
    """Two turns with a tool's answer between them; sample s ends as `plays[s]` says.

    A number is its reward; "fail" fails in EVAL, "none" before the policy has said anything; "cut" is worth 1 and
    truncated; "two" is worth 1 and has two sequences.
    """

    class Task(BaseModel):
        question: str
        plays: list[str]

    def prompt(self, task: Task) -> str:
        return task.question

    async def run(self, ctx: Context) -> None:
        play = ctx.task.plays[ctx.sample]
        if play == "none":
            raise TaskError("there is nothing to say to this")
        await ctx.policy.ready()
        talk = Talk(ctx, self.messages(ctx), [])
        talk.open()
        await talk.act()
        if play == "two":
            talk.open([{"role": "user", "content": "Once more, from the start."}])
        else:
            talk.hear([{"role": "tool", "tool_call_id": "call-1", "name": "bash", "content": "total 3\nnotes.txt\n"}])
        await talk.act()
        if play == "cut":
            ctx.trajectory.truncated = "turns"

    async def eval(self, ctx: Context) -> float:
        play = ctx.task.plays[ctx.sample]
        if play == "fail":
            raise ValueError("the grader broke")
        return 1.0 if play in ("cut", "two") else float(play)
