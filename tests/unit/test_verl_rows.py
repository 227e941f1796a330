"""Rows of verl's dataset as tasks: as its agent loops get them, numpy's values and verl's own additions included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.adapters.verl_rows import sampling_of, task_of
from pipeline.config import DatasetConfig
from pipeline.errors import TaskError

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 x 7?"}]


def row(**changes: Any) -> dict[str, Any]:
    """As RLHFDataset hands it on, with what verl adds."""
    prompt = np.empty(2, dtype=object)
    prompt[:] = ASKED
    return {
        "data_source": "openai/gsm8k", "ability": "math", "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": np.int64(3), "split": "train"}, "raw_prompt": prompt, "uid": "u", "session_id": 1,
        "agent_name": "rollout_line", "global_steps": 5, "index": np.int64(3), "priority": np.int64(1),
        "tools_kwargs": {}, "interaction_kwargs": {}, **changes,
    }  # fmt: skip


def test_columns_that_are_known_need_no_mapping() -> None:
    task = task_of(row())
    assert (task.handler, task.data) == ("math", {"question": "What is 6 x 7?", "expected_answer": "42"})


def test_a_prompt_that_is_there_wins_over_the_messages() -> None:
    assert task_of(row(prompt="What is 1 + 1?")).data["question"] == "What is 1 + 1?"


def test_a_handler_gets_the_rows_columns_and_nothing_of_verls() -> None:
    task = task_of(row(files=["a", "b"]), handler="mine:Files")
    assert task.handler == "mine:Files" and task.data["files"] == ["a", "b"]
    assert not task.data.keys() & {"uid", "session_id", "agent_name", "index", "priority", "raw_prompt", "tools_kwargs"}


def test_a_mapping_says_it_for_columns_of_no_known_kind() -> None:
    mapping = DatasetConfig(handler="math", fields={"question": "raw_prompt.user.content"}, id="")
    with pytest.raises(TaskError, match="raw_prompt"):
        task_of(row(), dataset=mapping)
    mapping = DatasetConfig(handler="math", fields={"question": "prompt.user.content", "expected_answer": "label"})
    assert task_of({"raw_prompt": ASKED, "label": "42"}, dataset=mapping).data["expected_answer"] == "42"


def test_a_row_that_is_no_task_is_named() -> None:
    with pytest.raises(TaskError, match="verl's dataset"):
        task_of({"raw_prompt": ASKED, "uid": "u"})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True},
         {"temperature": 1.0, "top_p": 0.9}),
        ({"temperature": np.float64(0.0), "top_k": np.int64(50), "repetition_penalty": 1.1},
         {"temperature": 0.0, "top_k": 50, "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_sampling_keeps_what_changes_the_distribution(params: dict[str, Any], expected: dict[str, Any]) -> None:
    found = sampling_of(params)
    assert found == expected and all(type(value) in (int, float) for value in found.values())
