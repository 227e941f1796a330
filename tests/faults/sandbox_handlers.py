"""Handlers that act in a sandbox, for tests of the host: plain commands, and what EVAL sees of them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel

from handlers.turns import Turns
from pipeline.interfaces import AgentHandler, Context, Reward


class Shell(AgentHandler):
    """Runs the task's commands in its sandbox; `said` is what they printed."""

    class Task(BaseModel):
        commands: list[str]

    sandbox: ClassVar[dict[str, Any] | None] = {}

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        ctx.state["said"] = [(await ctx.sandbox.bash(command)).text for command in ctx.task.commands]

    async def eval(self, ctx: Context) -> Reward:
        seen = (await ctx.sandbox.bash(ctx.task.commands[-1])).text if ctx.sandbox is not None else None
        return Reward(value=1.0, evidence={"said": ctx.state["said"], "seen": seen})


class ShellSame(Shell):
    """Looks into the same sandbox again in EVAL."""

    eval_sandbox = "same"


class ShellFresh(Shell):
    """Looks into a fresh one."""

    eval_sandbox = "fresh"


TURNS = 40


class Counting(Turns):
    """Forty bash calls; scored by the lines that they left in the sandbox."""

    class Task(BaseModel):
        word: str

    tools = ("bash",)
    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "same"

    def prompt(self, task: Counting.Task) -> str:
        return counting(task.word)

    async def eval(self, ctx: Context) -> float:
        assert ctx.sandbox is not None
        return float((await ctx.sandbox.bash("wc -l < count")).text)


def counting(word: str) -> str:
    return f"Write {word} into the file, {TURNS} times."
