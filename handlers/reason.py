"""Reasoning puzzles: any of reasoning-gym's task families by name, generated from a seed, scored by its own scorer.

`init` and `eval` are plain methods and run in a child process, which imports reasoning-gym (1.5 s, 150 MB) once. INIT
makes the item and keeps its question; some families draw from sets, so EVAL checks that it scores the very same item.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from handlers.turns import Turns, as_messages
from pipeline.errors import GraderError, TaskError
from pipeline.interfaces import Context, Message, Reward

SIZE = 512
"""Items of a dataset that are asked for at least: some families prepare all of them."""

TAIL = 100_000
"""Characters of the answer that are looked at, from its end."""

HOW = "Think step by step. Give your final answer between <answer> and </answer> tags, and nothing else between them."
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


class Reason(Turns):
    """The family's own score, from 0.0 to 1.0."""

    preload: ClassVar[tuple[str, ...]] = ("handlers.gym",)

    class Task(BaseModel):
        """Item `index` of `family`'s dataset made from `seed`; `config` are the family's own settings."""

        model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

        family: str
        seed: Annotated[int, Field(ge=0)] = 0
        index: Annotated[int, Field(ge=0, le=1_000_000)] = 0
        config: dict[str, Any] = Field(default_factory=dict)

    def init(self, ctx: Context) -> None:  # type: ignore[override]
        ctx.state["question"] = entry_of(ctx.task)["question"]

    def prompt(self, task: Reason.Task) -> str:
        return f"{entry_of(task)['question']}\n\n{HOW}"

    def messages(self, ctx: Context) -> list[Message]:
        return as_messages(f"{ctx.state['question']}\n\n{HOW}")

    def eval(self, ctx: Context) -> Reward:  # type: ignore[override]
        entry = entry_of(ctx.task)
        if entry["question"] != ctx.state["question"]:
            raise GraderError(
                f"{ctx.task.family} made another item from the same seed here than in init: its generator depends on "
                "Python's hash seed, so init and eval must run with the same PYTHONHASHSEED"
            )
        return grade(ctx.task, entry, ctx.answer)

    def gold(self, task: Reason.Task) -> str | None:
        answer = entry_of(task)["answer"]
        return None if answer is None else str(answer)


def entry_of(task: Reason.Task) -> dict[str, Any]:
    """The item: question, answer and the generator's own data. Raises TaskError when it can't be made."""
    try:
        return dict(_dataset_of(task)[task.index])
    except IndexError:
        raise TaskError(f"field 'index' is {task.index}: {task.family} has no such item") from None


def _dataset_of(task: Reason.Task) -> Any:
    size = max(SIZE, 1 << task.index.bit_length())
    return _dataset(task.family, task.seed, size, json.dumps(task.config, sort_keys=True, default=str))


@functools.lru_cache(maxsize=256)
def _dataset(family: str, seed: int, size: int, config: str) -> Any:
    from handlers.gym import DATASETS, reasoning_gym

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=5, cutoff=0.4)
        rest = [name for name in sorted(DATASETS) if name not in near]
        raise TaskError(f"field 'family' is {family!r}: unknown (known: {', '.join([*near, *rest])})")
    try:
        return reasoning_gym.create_dataset(family, **{"size": size, **json.loads(config), "seed": seed})
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise TaskError(f"field 'config' is {config:.200}: {family} can't be made of it: {error}") from error


def grade(task: Reason.Task, entry: dict[str, Any], text: str) -> Reward:
    """The family's score of what `text` answers. A scorer that only this answer breaks gives 0.0."""
    answer, where = extract(text[-TAIL:])
    dataset = _dataset_of(task)
    try:
        score = float(dataset.score_answer(answer, entry)) if answer is not None else 0.0
        how = f"scored, from {where}"
    except Exception as error:  # scorers parse the model's text and raise anything at all
        score, how = 0.0, f"the scorer raised {type(error).__name__} on this answer: {error}"[:500]
        _check_scorer(dataset, entry, task.family)
    evidence = {"why": how, "read": None if answer is None else answer[:500], "gold": str(entry["answer"])[:500]}
    return Reward(value=score, parts={"score": score}, evidence=evidence)


def _check_scorer(dataset: Any, entry: dict[str, Any], family: str) -> None:
    """Raise GraderError unless the scorer works on the right answer: then it was the policy's answer that broke it."""
    try:
        dataset.score_answer(entry["answer"], entry)
    except Exception as error:
        raise GraderError(f"{family}'s scorer raises on the right answer too: {error}") from error


def extract(text: str) -> tuple[str | None, str]:
    """The answer in `text` and where it stood: the last <answer>, else the last \\boxed{}, else the last line."""
    tagged = text.rfind("</answer>")
    opened = text.rfind("<answer>", 0, tagged) if tagged >= 0 else -1
    if opened >= 0:
        return text[opened + len("<answer>") : tagged].strip(), "<answer>"
    boxed = _BOXED.findall(text)
    if boxed:
        return str(boxed[-1]).strip(), "\\boxed"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1], "the last line") if lines else (None, "nothing")
