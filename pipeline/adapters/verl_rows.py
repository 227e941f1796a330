"""What verl gives to an agent loop, as a task of the line: a row of its dataset, and sampling settings (verl 0.9.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.config import DatasetConfig
from pipeline.datasets import tasks_of_rows
from pipeline.envelope import Task

VERLS = frozenset({
    "agent_name", "dummy_tensor", "global_steps", "index", "interaction_kwargs", "priority", "raw_prompt", "session_id",
    "tools_kwargs", "uid",
})  # fmt: skip
"""What verl adds to a row of the dataset."""

NEUTRAL = {"top_k": (-1, 0), "repetition_penalty": (1.0,), "logprobs": (True, False, 0, 1, None)}
"""Of verl's sampling settings, those with these values change nothing: the line always keeps logprobs."""


def task_of(row: Mapping[str, Any], *, handler: str | None = None, dataset: DatasetConfig | None = None) -> Task:
    """The task of a row of verl's dataset, by its columns, its handler or a mapping. Raises TaskError.

    verl's own additions are left out; `raw_prompt`, the messages, stands in for a column `prompt` that is not there.
    """
    columns = {name: value for name, value in row.items() if name not in VERLS}
    if "raw_prompt" in row:
        columns.setdefault("prompt", list(row["raw_prompt"]))
    (task,) = tasks_of_rows([columns], dataset=dataset, handler=handler, name="verl's dataset")
    return task


def sampling_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """verl's sampling settings as a task's; those that change nothing are left out."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in params.items()}
    return {name: value for name, value in plain.items() if value not in NEUTRAL.get(name, ())}
