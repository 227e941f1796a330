"""Handlers that behave badly on purpose. Each start of `run` is written down: a line at the end of file `starts`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import Annotated

from pydantic import Field

from handlers.echo import Echo
from pipeline.errors import PolicyError, SandboxError
from pipeline.interfaces import AgentHandler, Context


class Recorded(Echo):
    """An echo that writes its starts down."""

    class Task(Echo.Task):
        """`starts`: path of the file. `seconds`: how long the bad thing lasts."""

        starts: str
        seconds: Annotated[float, Field(ge=0)] = 0.0

    async def run(self, ctx: Context) -> None:
        started(ctx)
        await super().run(ctx)


class Flaky(Echo):
    """Every stage fails once."""

    async def init(self, ctx: Context) -> None:
        self._fail_once(ctx)

    async def run(self, ctx: Context) -> None:
        self._fail_once(ctx)
        await super().run(ctx)

    async def eval(self, ctx: Context) -> float:
        self._fail_once(ctx)
        return await super().eval(ctx)

    @staticmethod
    def _fail_once(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise SandboxError("it broke, this once")


class Poison(Recorded):
    """Kills the process that runs it."""

    async def run(self, ctx: Context) -> None:
        started(ctx)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


class Busy(Recorded):
    """Keeps the interpreter busy and never yields to the event loop."""

    async def run(self, ctx: Context) -> None:
        started(ctx)
        end = time.monotonic() + ctx.task.seconds
        while time.monotonic() < end:
            sum(range(1000))
        await Echo.run(self, ctx)


class Blocker(Recorded):
    """Holds the event loop, at its first attempt."""

    async def run(self, ctx: Context) -> None:
        first = not os.path.exists(ctx.task.starts)
        started(ctx)
        if first:
            time.sleep(ctx.task.seconds)  # noqa: ASYNC251 (that is the fault)
        await Echo.run(self, ctx)


class Swallower(Recorded):
    """Takes no notice of a cancel, at its first attempt."""

    async def run(self, ctx: Context) -> None:
        first = not os.path.exists(ctx.task.starts)
        started(ctx)
        end = time.monotonic() + ctx.task.seconds if first else 0.0
        while time.monotonic() < end:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        await Echo.run(self, ctx)


class Hanging(AgentHandler):
    """A plain method that starts a process of its own and waits for it, for `seconds`."""

    Task = Recorded.Task

    def run(self, ctx: Context) -> None:
        started(ctx)
        child = subprocess.Popen(["sleep", str(ctx.task.seconds)])
        with open(ctx.task.starts + ".pids", "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
        child.wait()

    async def eval(self, ctx: Context) -> float:
        return 1.0


class Merging(Recorded):
    """Raises in sample 3."""

    async def run(self, ctx: Context) -> None:
        await super().run(ctx)
        if ctx.sample == 3:
            raise KeyError("merge")


class Rewarding(Recorded):
    """Rewards 1, 0, 1 for samples 0, 1, 2; `text` says in which stage (or "all") the infrastructure fails others."""

    async def init(self, ctx: Context) -> None:
        self._fail(ctx, "init")

    async def run(self, ctx: Context) -> None:
        await super().run(ctx)
        self._fail(ctx, "run")

    async def eval(self, ctx: Context) -> float:
        return 1.0 - ctx.sample % 2

    @staticmethod
    def _fail(ctx: Context, stage: str) -> None:
        if ctx.sample == 3 or "all" in ctx.task.text:
            if ctx.task.text.startswith("init") and stage == "init":
                raise SandboxError("the sandbox does not start")
            if ctx.task.text.startswith("run") and stage == "run":
                raise PolicyError("the policy refuses connections")


def started(ctx: Context) -> None:
    with open(ctx.task.starts, "a", encoding="utf-8") as file:
        file.write(f"{ctx.id} {ctx.attempt} {os.getpid()}\n")
