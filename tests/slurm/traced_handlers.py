"""Handlers for storms on Slurm: every execution of a stage leaves a line of its own, and each hands on who it was.

`trace` is a folder; the file of a rollout's id there holds `STAGE NONCE beginning|end`. A rollout's record names the
execution of each stage that counted, and each of these names the one before: two that both counted would show.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from handlers.turns import Turns
from pipeline.interfaces import AgentHandler, Context, Message, Reward, ToolCall

STEPS = 4
NAP = 0.1
"""Seconds that each command takes, beside the policy's own."""


class Task(BaseModel):
    """`number` is the task's own: its reward is made of it. `trace`: a folder."""

    number: int
    trace: str


def begin(ctx: Context, stage: str) -> str:
    nonce = secrets.token_hex(4)
    leave(ctx, stage, nonce, "beginning")
    return nonce


def leave(ctx: Context, stage: str, nonce: str, what: str) -> None:
    line = os.open(Path(ctx.task.trace) / ctx.id.replace("/", "_"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(line, f"{stage} {nonce} {what}\n".encode())
    os.close(line)


def reward_of(number: int) -> float:
    """What the task with this number is worth."""
    return (number % 97 + 1) / 100


def question(number: int) -> str:
    return f"Write the numbers from {number} into the file tally."


def answers(numbers: range) -> dict[str, Any]:
    """What a scripted policy does when asked for these."""
    return {question(number): _turns(number) for number in numbers}


def _turns(number: int) -> list[dict[str, Any]]:
    said = []
    for step in range(STEPS):
        command = f"echo {number + step} >> tally; sleep {NAP}; echo wrote {number + step}"
        call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return [*said, {"role": "assistant", "content": "done"}]


class Traced(Turns):
    """The policy's commands write numbers into a sandbox, which EVAL looks into."""

    Task = Task
    tools = ("bash",)
    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "same"

    def prompt(self, task: Any) -> str:
        return question(task.number)

    async def init(self, ctx: Context) -> None:
        nonce = begin(ctx, "init")
        assert ctx.sandbox is not None
        await ctx.sandbox.write("made", f"{ctx.id} {nonce}".encode())
        ctx.state["init"] = nonce
        leave(ctx, "init", nonce, "end")

    async def run(self, ctx: Context) -> None:
        nonce = begin(ctx, "run")
        assert ctx.sandbox is not None
        ctx.state.update(run=nonce, run_after=ctx.state["init"], heard=[])
        await super().run(ctx)
        leave(ctx, "run", nonce, "end")

    async def use(self, ctx: Context, call: ToolCall) -> Message:
        message = await super().use(ctx, call)
        ctx.state["heard"] = [*ctx.state["heard"], str(message["content"])]
        return message

    async def eval(self, ctx: Context) -> Reward:
        nonce = begin(ctx, "eval")
        assert ctx.sandbox is not None
        files = {name: (await ctx.sandbox.read(name)).decode().split() for name in ("made", "tally")}
        written = [str(ctx.task.number + step) for step in range(STEPS)]
        value = reward_of(ctx.task.number) if files["tally"] == written else 0.0
        leave(ctx, "eval", nonce, "end")
        state = {name: ctx.state[name] for name in ("init", "run", "run_after", "heard")}
        return Reward(value=value, evidence={**state, **files, "eval": nonce})


class Plain(AgentHandler):
    """No sandbox, no policy: it goes from worker to worker."""

    Task = Task

    async def init(self, ctx: Context) -> None:
        ctx.state["init"] = begin(ctx, "init")
        leave(ctx, "init", ctx.state["init"], "end")

    async def run(self, ctx: Context) -> None:
        ctx.state.update(run=begin(ctx, "run"), run_after=ctx.state["init"])
        await asyncio.sleep(STEPS * NAP * 2)
        ctx.trajectory.prompt(list(range(10, 20)))
        ctx.trajectory.action([ctx.task.number, 7], [-0.5, -0.5], [(0, 0, 2)])
        leave(ctx, "run", ctx.state["run"], "end")

    async def eval(self, ctx: Context) -> Reward:
        nonce = begin(ctx, "eval")
        leave(ctx, "eval", nonce, "end")
        state = {name: ctx.state[name] for name in ("init", "run", "run_after")}
        return Reward(value=reward_of(ctx.task.number), evidence={**state, "eval": nonce})


KINDS = ("Traced", "Traced", "Plain")
