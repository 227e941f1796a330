"""Handlers that are hard to evaluate: sandboxes by task, computation in a child, tests that do not end."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from pydantic import BaseModel

from pipeline.errors import EvaluationTimeout, GraderError
from pipeline.interfaces import AgentHandler, Context, Reward


def double(value: Any) -> list[Any]:
    return [value * 2, os.getpid()]


def pair(value: Any) -> Any:
    return {value}


def spin() -> None:
    time.sleep(600)


def fail(text: str) -> None:
    raise KeyError(text)


class Only(AgentHandler):
    """RUN has no sandbox; EVAL has one, with this task's file."""

    class Task(BaseModel):
        text: str

    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "only"

    def sandbox_for(self, task: Only.Task) -> dict[str, Any]:
        return {"files": {"told": task.text}}

    async def run(self, ctx: Context) -> None:
        ctx.state["had"] = ctx.sandbox is not None

    async def eval(self, ctx: Context) -> Reward:
        assert ctx.sandbox is not None
        kept = ctx.keep("deep/note.txt", b"kept")
        seen = (await ctx.sandbox.bash("cat told")).text
        return Reward(value=1.0, evidence={"had": ctx.state["had"], "seen": seen, "kept": kept})


class Computes(AgentHandler):
    """Calls functions in a child: one that answers, one that never does, one that raises."""

    async def run(self, ctx: Context) -> None:
        ctx.state["answer"] = ""

    async def eval(self, ctx: Context) -> Reward:
        doubled, pid = await ctx.compute(double, b"ab")
        try:
            await ctx.compute(spin, timeout=0.2)
            late = ""
        except TimeoutError:
            late = "killed"
        if ctx.attempt == 1:
            await ctx.compute(fail, "boom")
        return Reward(value=1.0, evidence={"doubled": doubled, "apart": pid != os.getpid(), "late": late})


class Late(AgentHandler):
    """Its tests do not end in time, as often as the task says."""

    class Task(BaseModel):
        late: int = 9

    async def run(self, ctx: Context) -> None:
        ctx.state["answer"] = ""

    async def eval(self, ctx: Context) -> float:
        if ctx.attempt <= ctx.task.late:
            raise EvaluationTimeout("the tests took longer than 5 s", {"ran": 12, "passed": 11})
        return 1.0


class LatePlainly(AgentHandler):
    """As Late, in a child process; first of all its grader breaks."""

    async def run(self, ctx: Context) -> None:
        ctx.state["answer"] = ""

    def eval(self, ctx: Context) -> float:  # type: ignore[override]
        if ctx.attempt == 1:
            raise GraderError("no grader now")
        raise EvaluationTimeout("the tests took longer than 5 s", {"ran": 12})


class Odd(AgentHandler):
    """Wants a sandbox that can't be had, or gives back what no process can send."""

    class Task(BaseModel):
        does: str

    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "only"

    def sandbox_for(self, task: Odd.Task) -> Any:
        if task.does == "raises":
            raise KeyError(task.does)
        return None if task.does == "nothing" else {task.does: 1}

    async def run(self, ctx: Context) -> None:
        ctx.state["answer"] = ""

    async def eval(self, ctx: Context) -> float:
        return 0.0


class Unsent(AgentHandler):
    """Computes what can't travel: as an argument, or as a result."""

    class Task(BaseModel):
        does: str

    async def run(self, ctx: Context) -> None:
        if ctx.task.does == "argument":
            await ctx.compute(double, {1, 2})
        await ctx.compute(pair, 1)

    async def eval(self, ctx: Context) -> float:
        return 0.0


class Stuck(AgentHandler):
    """Its evaluation reaches the stage's own limit."""

    async def run(self, ctx: Context) -> None:
        ctx.state["answer"] = ""

    def eval(self, ctx: Context) -> float:  # type: ignore[override]
        time.sleep(600)
        return 1.0
