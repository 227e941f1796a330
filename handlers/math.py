"""Competition mathematics: a question with one right answer, compared as mathematics by math-verify, gold first.

`init` and `eval` are plain methods, so they run in a child process: math-verify stops itself by an alarm signal, which
only a main thread may set, and its comparison is asymmetric.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, StringConstraints

from handlers.turns import Turns
from pipeline.errors import GraderError, TaskError
from pipeline.interfaces import Context, Reward

SECONDS = 5
"""Longest parse and longest comparison. The stage's own limit stands behind it."""

TAIL = 20_000
"""Characters of the answer that are looked at, from its end."""

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Math(Turns):
    """1.0 for the right answer in the last \\boxed{}, else 0.0."""

    preload: ClassVar[tuple[str, ...]] = ("math_verify",)

    class Task(BaseModel):
        """`question` in words and LaTeX; `expected_answer` in LaTeX, with or without dollar signs."""

        model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

        question: Text
        expected_answer: Text

    def init(self, ctx: Context) -> None:  # type: ignore[override]
        gold_of(ctx.task.expected_answer)

    def prompt(self, task: Math.Task) -> str:
        return f"{task.question}\n\nReason step by step, and put your final answer within \\boxed{{}}."

    def eval(self, ctx: Context) -> Reward:  # type: ignore[override]
        return grade(ctx.task.expected_answer, ctx.answer)

    def gold(self, task: Math.Task) -> str:
        return task.expected_answer.strip("$")


def gold_of(expected: str) -> list[Any]:
    """The right answer as math-verify reads it. Raises TaskError when it is no mathematics."""
    whole = expected if "$" in expected or "\\boxed" in expected else f"${expected}$"
    read = _parse(whole, "expected_answer")
    if all(isinstance(item, str) for item in read):
        raise TaskError(f"field 'expected_answer' is {expected!r:.200}: it can't be read as mathematics (write LaTeX)")
    return read


def grade(expected: str, answer: str) -> Reward:
    """Compare, gold first. What can't be read or compared in the answer is a wrong answer."""
    from math_verify import verify
    from math_verify.errors import TimeoutException

    gold = gold_of(expected)
    try:
        said = _parse(answer[-TAIL:], "answer")
        right = bool(verify(gold, said, timeout_seconds=SECONDS))
        why = "compared"
    except (GraderError, TimeoutException) as error:
        said, right, why = [], False, str(error) or "the comparison took too long"
    evidence = {"read": str(said[0])[:500] if said else None, "gold": str(gold[0])[:500], "how": why}
    return Reward(value=float(right), parts={"correct": float(right)}, evidence=evidence)


def _parse(text: str, what: str) -> list[Any]:
    from math_verify import parse
    from math_verify.errors import TimeoutException

    try:
        return list(parse(text, parsing_timeout=SECONDS, raise_on_error=True))
    except TimeoutException:
        raise GraderError(f"reading the {what} took more than {SECONDS} s") from None
    except ValueError as error:
        if "main thread" in str(error):
            raise GraderError(
                "math-verify runs in a process's main thread only: call it from a plain method"
            ) from error
        return []
    except Exception:  # sympy and its parser raise anything at all on text that is no mathematics
        return []
