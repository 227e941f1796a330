"""Datasets that are known by their columns: the SWE-bench family's, and those made for verl.

What is recognised becomes the same mapping that a section of `datasets` would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.columns import at
from pipeline.config import DatasetConfig
from pipeline.errors import TaskError

SWE = frozenset({"instance_id", "repo", "base_commit", "problem_statement", "test_patch"})
"""What SWE-bench, SWE-Gym, SWE-rebench and NeMo-Gym's rows have in common."""

VERL = frozenset({"data_source", "prompt", "reward_model"})

MATH_WORDS = ("math", "gsm8k", "aime", "amc", "olympiad", "numina", "minerva", "deepscaler")
CODE_WORDS = ("code", "apps", "taco", "leetcode")
"""Parts of a `data_source` (an `ability` is compared whole) that say which family its rows are."""

ABILITIES = {"math": "math", "mathematics": "math", "code": "code", "coding": "code", "programming": "code"}

VERL_FIELDS = {
    "math": {"question": "prompt.user.content", "expected_answer": "{reward_model.ground_truth}"},
    "code": {"question": "prompt.user.content", "input_output": "reward_model.ground_truth"},
}

HOW = "say --handler NAME for rows that are a task's data as they are, or --dataset NAME for a mapping of your own"
WHERE = "(section `datasets`, docs/datasets.md)"


def recognised(row: Mapping[str, Any], number: int, handler: str | None) -> DatasetConfig | None:
    """The mapping of a row whose columns are known; None where they are not. `number`: of the row in its file.

    `handler` wins over what the columns say. Raises TaskError where the columns are known and what they hold is not.
    """
    if row.keys() >= SWE:
        return DatasetConfig(handler=handler or "swe", id="instance_id")
    if row.keys() >= VERL:
        return _verl(row, number, handler)
    return None


def unknown(columns: Iterable[str]) -> TaskError:
    """What to say of a row that names no handler and has columns that nobody knows."""
    named = sorted(map(str, columns))
    lacks = sorted(SWE - set(named))
    near = f"; of SWE-bench's columns it lacks {', '.join(lacks)}" if len(lacks) < 3 else ""
    return TaskError(
        f"it names no handler, and its columns are of no known kind ({', '.join(named):.300}{near}): {HOW} {WHERE}"
    )


def _verl(row: Mapping[str, Any], number: int, handler: str | None) -> DatasetConfig:
    family = handler.rpartition(":")[2].lower() if handler else _family(row)
    fields = dict(VERL_FIELDS.get(family, VERL_FIELDS["math"]))
    if isinstance(row["prompt"], str):
        fields["question"] = "prompt"
    return DatasetConfig(
        handler=handler or family, id=_verl_id(row, number), fields=fields, keep=family not in VERL_FIELDS
    )


def _family(row: Mapping[str, Any]) -> str:
    seen = next((name for name in ("images", "videos", "audios") if row.get(name) is not None and len(row[name])), "")
    if seen:
        raise TaskError(f"it has {seen}, which the built-in families do not show to the policy: {HOW} {WHERE}")
    ability, source = str(row.get("ability") or "").lower(), str(row["data_source"] or "").lower()
    style = _value(row, "reward_model.style")
    if style is not None and not str(style).startswith("rule"):
        raise TaskError(
            f"its reward_model.style is {style!r:.40}, and only rows that a rule scores are recognised: {HOW} {WHERE}"
        )
    if ability in ABILITIES:
        return ABILITIES[ability]
    if not ability and any(word in source for word in MATH_WORDS):
        return "math"
    if not ability and any(word in source for word in CODE_WORDS):
        return "code"
    raise TaskError(
        f"it has verl's columns, but of which family it is can't be told from ability {ability!r:.40} and data_source "
        f"{source!r:.80}: {HOW} {WHERE}"
    )


def _verl_id(row: Mapping[str, Any], number: int) -> str:
    """Source, split and index: the same row has the same id in every run."""
    split, index = _value(row, "extra_info.split"), _value(row, "extra_info.index")
    parts = ["{data_source}"]
    parts += ["{extra_info.split}"] if split is not None else []
    parts += ["{extra_info.index}"] if index is not None else [f"row{number}"]
    return "-".join(parts)


def _value(row: Mapping[str, Any], path: str) -> Any:
    """What is there, or None."""
    try:
        return at(row, path)
    except TaskError:
        return None
