"""Handlers whose first attempt waits in a process that dies of a signal, and which believe what that process says.

Each waits in one place (`sleep SECONDS`, with a number of the test's own), the first time that it comes there; whatever
it is told of that process goes into the file `seen`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any, ClassVar

from pydantic import BaseModel

from pipeline.interfaces import AgentHandler, Context, Reward


class Waiting(AgentHandler):
    """A place to wait in: `once` for the first attempt."""

    class Task(BaseModel):
        """`seen`: a file. `seconds`: how long the first attempt's process sleeps."""

        seen: str
        seconds: str

    @staticmethod
    def command(ctx: Context) -> str:
        """`sleep`, once; what comes after it shows how it ended."""
        first = not os.path.exists(ctx.task.seen)
        note(ctx, "begun")
        return f"sleep {ctx.task.seconds if first else 0} | cat; echo ended ${{PIPESTATUS[0]}}"

    async def in_sandbox(self, ctx: Context) -> float:
        assert ctx.sandbox is not None
        return judged(ctx, (await ctx.sandbox.bash(self.command(ctx))).text)

    async def run(self, ctx: Context) -> None:
        return

    async def eval(self, ctx: Context) -> float | Reward:
        return 1.0


class InRun(Waiting):
    """In a command of RUN."""

    sandbox: ClassVar[dict[str, Any] | None] = {}

    async def run(self, ctx: Context) -> None:
        ctx.state["value"] = await self.in_sandbox(ctx)

    async def eval(self, ctx: Context) -> float:
        return float(ctx.state["value"])


class InInit(InRun):
    """In the preparation of a sandbox."""

    async def init(self, ctx: Context) -> None:
        ctx.state["value"] = await self.in_sandbox(ctx)

    async def run(self, ctx: Context) -> None:
        return


class InFresh(Waiting):
    """In the tests of an evaluation, in a sandbox of their own."""

    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "fresh"

    async def eval(self, ctx: Context) -> float:
        return await self.in_sandbox(ctx)


class InChild(Waiting):
    """In a process that a plain `eval` starts in its child."""

    def eval(self, ctx: Context) -> float:
        return judged(ctx, subprocess.run(["bash", "-c", self.command(ctx)], capture_output=True, text=True).stdout)


class InWorker(Waiting):
    """In a process that the handler starts in the worker's own."""

    async def eval(self, ctx: Context) -> float:
        process = await asyncio.create_subprocess_exec("bash", "-c", self.command(ctx), stdout=subprocess.PIPE)
        said, _ = await process.communicate()
        return judged(ctx, said.decode())


def judged(ctx: Context, said: str) -> float:
    """Right is what ended by itself."""
    note(ctx, said.strip() or "nothing")
    return float("ended 0" in said)


def note(ctx: Context, text: str) -> None:
    with open(ctx.task.seen, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


class Pausing(AgentHandler):
    """Sleeps in one stage, the first time that it comes there; `seen` then gets a line."""

    class Task(BaseModel):
        """`stage`: where. `seen`: a file."""

        stage: str
        seen: str

    @staticmethod
    async def pause(ctx: Context, stage: str) -> None:
        if ctx.task.stage == stage and not os.path.exists(ctx.task.seen):
            note(ctx, stage)
            await asyncio.sleep(3600)

    async def init(self, ctx: Context) -> None:
        await self.pause(ctx, "init")

    async def run(self, ctx: Context) -> None:
        await self.pause(ctx, "run")

    async def eval(self, ctx: Context) -> float:
        await self.pause(ctx, "eval")
        return 1.0
