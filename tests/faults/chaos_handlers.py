"""Handlers for tests that break the line under sandboxes: each leaves numbers in a file; what ran twice shows."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, ClassVar

from pydantic import BaseModel

from handlers.turns import Turns
from pipeline.errors import LineError, SandboxError
from pipeline.interfaces import AgentHandler, Context, Reward

STEPS = 6


class Tally(AgentHandler):
    """Writes 1, 2, 3 … into a file, a command each; `tally` is what the file holds at the end."""

    class Task(BaseModel):
        steps: int = STEPS
        nap: float = 0.05

    sandbox: ClassVar[dict[str, Any] | None] = {}

    async def init(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        await ctx.sandbox.write("made", ctx.id.encode())

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        for number in range(1, ctx.task.steps + 1):
            await ctx.sandbox.bash(f"echo {number} >> tally; sleep {ctx.task.nap}")
        ctx.state["tally"] = (await ctx.sandbox.read("tally")).decode().split()
        ctx.state["made"] = (await ctx.sandbox.read("made")).decode()

    async def eval(self, ctx: Context) -> Reward:
        seen = (await ctx.sandbox.bash("cat tally 2>&1")).text.split() if ctx.sandbox is not None else None
        return Reward(value=1.0, evidence={**ctx.state, "seen": seen})


class TallySame(Tally):
    eval_sandbox = "same"


class TallyFresh(Tally):
    eval_sandbox = "fresh"


class TallyAnew(TallySame):
    """Can't be gone on with: starts over at INIT."""

    resumable = False


class Spoken(Turns):
    """The policy's commands write the numbers."""

    class Task(BaseModel):
        word: str = "numbers"

    tools = ("bash",)
    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "same"

    def prompt(self, task: Spoken.Task) -> str:
        return spoken(task.word)

    async def eval(self, ctx: Context) -> Reward:
        assert ctx.sandbox is not None
        seen = (await ctx.sandbox.bash("cat tally")).text.split()
        return Reward(value=1.0, evidence={"tally": seen, "made": ctx.id, "seen": seen})


def spoken(word: str) -> str:
    return f"Write {word} into the file tally."


def spoken_turns() -> list[dict[str, Any]]:
    """What a scripted policy does when asked for `spoken`."""
    calls = [
        {"type": "function", "function": {"name": "bash", "arguments": {"command": f"echo {number} >> tally"}}}
        for number in range(1, STEPS + 1)
    ]
    said = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    return [*said, {"role": "assistant", "content": "done"}]


STORM = ("Tally", "TallySame", "TallyFresh", "TallyAnew", "Spoken")


class Swallows(TallySame):
    """Catches whatever its sandbox raises, and goes on as if nothing had been."""

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        ctx.state["made"] = ctx.id
        for number in range(1, ctx.task.steps + 1):
            with contextlib.suppress(Exception):
                await ctx.sandbox.bash(f"echo {number} >> tally; sleep {ctx.task.nap}")
        with contextlib.suppress(Exception):
            ctx.state["tally"] = (await ctx.sandbox.read("tally")).decode().split()


class Translates(TallySame):
    """Makes an error of its own of whatever its sandbox raises."""

    async def run(self, ctx: Context) -> None:
        try:
            await super().run(ctx)
        except Exception as error:
            raise RuntimeError("my shell is broken") from error


class Wanders(TallySame):
    """Does something else each time, and says nothing of it."""

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        await ctx.sandbox.bash(f"echo {random.random()} >> drawn; sleep 0.2")
        await super().run(ctx)


class Fills(TallySame):
    """Writes until its host's disk is full."""

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        await ctx.sandbox.bash("head -c 100M /dev/zero > big")
        for _ in range(100):  # the last page of its journal holds some of them
            await ctx.sandbox.bash("seq 500")


class Lingers(TallySame):
    """Leaves a task behind that goes on to use the sandbox."""

    left: ClassVar[set[asyncio.Task[None]]] = set()

    async def run(self, ctx: Context) -> None:
        await super().run(ctx)
        task = asyncio.create_task(self.go_on(ctx))
        self.left.add(task)
        task.add_done_callback(self.left.discard)

    async def go_on(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        with contextlib.suppress(LineError):
            while True:
                await ctx.sandbox.bash("echo late >> late")


class Breaks(TallySame):
    """Its sandbox breaks in the first attempt: it goes back to INIT for another."""

    async def run(self, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise SandboxError("broken for once")
        await super().run(ctx)
