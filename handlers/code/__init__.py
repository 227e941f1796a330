"""Programs: a question, and the program in the answer is run on hidden tests in a sandbox of EVAL's own."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from handlers.code.blocks import last_block
from handlers.code.judge import judge
from handlers.code.task import CodeTask, tests_of
from handlers.turns import Turns, as_messages
from pipeline.interfaces import Context, Message, Reward

__all__ = ["Code"]


class Code(Turns):
    """1.0 for a program that passes all tests, else 0.0; with `partial` the share of tests that it passes.

    The program is the last fenced block of the answer that is marked with the task's language, else the last without a
    mark. Expected outputs never enter the sandbox. Each test is a process of its own. Its CPU time limit (`time_limit`)
    is strict; its wall time limit is twice that and a second, so that a busy machine costs nobody a test. A program
    that ends in error, by a signal or beyond a limit fails its test whatever it has printed.

    Evidence: `why`, `tests`, `ran`, `passed`, `seconds` (wall time of the tests that ran), `slowest_cpu`, and of the
    first test that failed `failing` (number, why, input, expected, got; cut at 300 characters) and `stderr`.
    """

    preload: ClassVar[tuple[str, ...]] = ("handlers.code.records",)
    sandbox: ClassVar[dict[str, Any] | None] = {"processes": 128}
    eval_sandbox = "only"
    Task = CodeTask

    def sandbox_for(self, task: CodeTask) -> dict[str, Any]:
        return {**(self.sandbox or {}), **({"image": task.image} if task.image else {})}

    def init(self, ctx: Context) -> None:  # type: ignore[override]
        """In a child process, as reading the tests may take long. Raises TaskError."""
        ctx.state["function"] = _function(ctx.task)

    def messages(self, ctx: Context) -> list[Message]:
        return as_messages(_prompt(ctx.task, str(ctx.state["function"])))

    def prompt(self, task: CodeTask) -> str | list[Message]:
        return _prompt(task, "" if task.prompt else _function(task))

    async def eval(self, ctx: Context) -> Reward:
        language = ctx.task.how()
        program = last_block(ctx.answer, *language.marks)
        if program is None:
            why = f"the answer holds no closed block of {ctx.task.language} between ``` and ```"
            return Reward(
                value=0.0, parts={"correct": 0.0, "passed": 0.0}, evidence={"why": why, "ran": 0, "passed": 0}
            )
        return await judge(ctx, program)

    def gold(self, task: CodeTask) -> list[Message] | None:
        program = task.right_program()
        if program is None:
            return None
        return [{"role": "assistant", "content": f"```{task.language}\n{program.strip()}\n```"}]


def _function(task: CodeTask) -> str:
    """The function that the tests call, wherever the dataset names it; "" for a program."""
    return next((test.fn for test in tests_of(task.model_dump()) if test.fn), "")


def _prompt(task: CodeTask, function: str) -> str | list[Message]:
    return cast("str | list[Message]", task.prompt or _asked(task, function))


def _asked(task: CodeTask, function: str) -> str:
    parts = [task.question.strip() or task.question_content.strip()]
    if task.starter_code and task.starter_code.strip():
        parts.append(f"Complete this code:\n\n```{task.language}\n{task.starter_code.strip()}\n```")
        parts.append(f"Put the whole code into one ```{task.language} block.")
    elif function:
        parts.append(f"Write a {task.language} function `{function}`, and put it into one ```{task.language} block.")
    else:
        parts.append(
            f"Write a {task.language} program that reads from standard input and writes to standard output. Put the "
            f"whole program into one ```{task.language} block."
        )
    return "\n\n".join(parts)
