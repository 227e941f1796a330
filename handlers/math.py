"""Competition mathematics: a question with one right answer, compared as mathematics.

Where the answer stands is found in plain text (`handlers.answers`); it is compared item by item, gold first, by
math-verify (`handlers.equal`), in a child that is killed at a limit.
"""

from __future__ import annotations

import signal
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, StringConstraints

from handlers import answers, equal
from handlers.turns import Turns
from pipeline.errors import GraderError, TaskError
from pipeline.interfaces import Context, Reward

SECONDS = 5.0
"""For one check, by the clock: then its process is killed. Its CPU time ends earlier (`equal.CPU_SECONDS`)."""

GOLD_SECONDS = 1.0
"""For the right answer alone, after a comparison that was killed. If that takes longer, the machine is too busy to say
whose fault it was."""

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Math(Turns):
    """1.0 for the right answer in the last \\boxed{} (none: after "the answer is", or in the last line), else 0.0.

    Equal is what is mathematically equal: 0.75 and 3/4, x < 2 and an interval, a list in any order; a list that repeats
    an item or has an ellipsis keeps its order. Units, percent and money signs are ignored as math-verify ignores them.
    Texts and choices ("(B)") are right answers too. Two answers in one are wrong. Evidence: why, read, gold.
    """

    preload: ClassVar[tuple[str, ...]] = ("math_verify", "handlers.equal")

    class Task(BaseModel):
        """`question` in words and LaTeX; `expected_answer` in LaTeX, with or without dollar signs."""

        model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

        question: Text
        expected_answer: Text

    async def init(self, ctx: Context) -> None:
        await check(ctx, ctx.task.expected_answer)

    def prompt(self, task: Math.Task) -> str:
        return f"{task.question}\n\nReason step by step, and put your final answer within \\boxed{{}}."

    async def eval(self, ctx: Context) -> Reward:
        return await grade(ctx, ctx.task.expected_answer, answers.final(ctx.answer))

    def gold(self, task: Math.Task) -> str:
        return answers.bare(task.expected_answer)


async def check(ctx: Context, expected: str) -> None:
    """Raises TaskError for a right answer that can't be read, or that takes long to compare."""
    try:
        await ctx.compute(equal.check_gold, expected, timeout=SECONDS)
    except TimeoutError:
        raise GraderError(
            f"reading the right answer {expected!r:.200} took more than {SECONDS:g} s: write it simpler, or this "
            "machine is overloaded"
        ) from None


async def grade(ctx: Context, expected: str, said: answers.Said) -> Reward:
    """1.0 where the two are equal. Raises GraderError where the right answer can't be compared, or nothing can now."""
    if not said.text:
        return _reward(expected, {"correct": False, "read": None, "why": said.where})
    checks = (equal.compare, expected, said.text), (equal.check_gold, expected)
    found = await ended(ctx, *checks)
    return _reward(expected, {**found, "why": f"{found['why']} ({said.where})"})


async def ended(ctx: Context, check: tuple[Any, ...], gold: tuple[Any, ...]) -> dict[str, Any]:
    """What `check` finds (correct, read, why), whatever the policy's answer does to it: then it is wrong.

    Both are a function and its arguments; `gold` looks at the right answer alone. Raises GraderError.
    """
    for _ in range(2):  # once more: a machine that was busy for a moment must make no wrong answer of a right one
        try:
            return dict(await ctx.compute(*check, timeout=SECONDS))
        except TimeoutError:
            why = f"comparing it took more than {SECONDS:g} s, twice"
            await _gold_alone(ctx, gold)
        except GraderError as error:
            how = ENDS.get(str(getattr(error, "exit_code", "")))
            if how is None:
                raise
            why = f"comparing it {how}"
            await _gold_alone(ctx, gold)
            break
    return {"correct": False, "read": None, "why": why}


ENDS = {
    str(-signal.SIGXCPU): f"takes more than {equal.CPU_SECONDS:g} s",
    str(-signal.SIGSEGV): "overflows the grader's stack",
    str(-signal.SIGABRT): "takes more memory than a comparison may",
    str(-signal.SIGBUS): "takes more memory than a comparison may",
}
"""Ways in which only its own answer can end the grader's process; a SIGKILL comes from elsewhere."""


async def _gold_alone(ctx: Context, gold: tuple[Any, ...]) -> None:
    """Raise GraderError unless the right answer is read well without the policy's."""
    try:
        await ctx.compute(*gold, timeout=GOLD_SECONDS)
    except (TimeoutError, TaskError):
        raise GraderError(
            f"a comparison had to be ended, and the right answer alone ({gold[1]!r:.200}) takes more than "
            f"{GOLD_SECONDS:g} s: write it simpler, or this machine is too busy"
        ) from None


def _reward(expected: str, found: dict[str, Any]) -> Reward:
    right, read = float(found["correct"]), found["read"]
    evidence: dict[str, Any] = {"why": found["why"], "read": read and read[:500], "gold": expected[:500]}
    return Reward(value=right, parts={"correct": right}, evidence=evidence)
