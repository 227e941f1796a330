"""NeMo Gym's agent server, pure: rows become tasks, rollouts become answers that pass what NeMo RL asserts."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.adapters import gym
from pipeline.adapters.rows import AdapterError
from pipeline.builder import TrajectoryBuilder
from pipeline.config import DatasetConfig
from pipeline.errors import TaskError
from pipeline.interfaces import Parsed, ToolCall
from pipeline.results import Failed, Rollout
from tests.nemo_rl import calls_of

PARAMS = {"input": [{"role": "user", "content": "What is 6 x 7?"}], "temperature": 1.0, "max_output_tokens": 64}
ROW: dict[str, Any] = {"responses_create_params": PARAMS, "_ng_task_index": 7, "agent_ref": {"name": "line"}}


def played(turns: int = 2, sequences: int = 1, **about: Any) -> Rollout:
    """Prompt [1, 2, 3]; each action samples two ids, each observation is one."""
    builder = TrajectoryBuilder()
    for _ in range(sequences):
        builder.begin()
        builder.prompt([1, 2, 3])
        for turn in range(turns):
            builder.action([10 + turn, 9], [-0.5, -0.25], [(turn, 0, 2)], finish_reason="stop")
            if turn + 1 < turns:
                builder.observation([4])
    named = {"outcome": "scored", "reward": 0.5, "parts": {"tests": 0.5}, "trajectory": builder.build(), **about}
    return Rollout(id="math-1.0", group="math-1", sample=0, samples=1, lane="train", **named)


def test_items_go_on_from_each_other_and_the_last_of_a_call_has_the_ids() -> None:
    def read(ids: list[int], prompt: list[int]) -> Parsed:
        call = ToolCall(f"c{len(prompt)}", "bash", {"command": "ls"})
        return Parsed({"role": "assistant", "content": "hm", "reasoning_content": "so"}, [call] if ids[0] == 10 else [])

    answer = gym.answer(ROW, played(), model="m", created=5, read=read)
    output = answer["response"]["output"]

    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "reasoning", "message"]
    assert ["generation_token_ids" in item for item in output] == [False, False, True, False, True]
    assert calls_of(output) == [([1, 2, 3], [10, 9], [-0.5, -0.25]), ([4], [11, 9], [-0.5, -0.25])]
    assert (answer["reward"], answer["reward_components"], answer["mask_sample"]) == (0.5, {"tests": 0.5}, False)
    assert answer["responses_create_params"]["input"] == PARAMS["input"]
    assert answer["_ng_task_index"] == 7
    assert answer["rollout"]["versions"] == [0, 1]
    assert answer["response"]["usage"]["output_tokens"] == 4


def test_a_reply_that_was_gone_on_with_is_one_call() -> None:
    builder = TrajectoryBuilder()
    builder.prompt([1])
    builder.action([5], [-1.0], [(0, 0, 1)], finish_reason="abort")
    builder.action([6], [-2.0], [(1, 0, 1)], finish_reason="length")
    answer = gym.answer(ROW, played(trajectory=builder.build(), truncated="length"))
    assert calls_of(answer["response"]["output"]) == [([1], [5, 6], [-1.0, -2.0])]
    assert answer["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    "rollout",
    [
        played(outcome="failed", reward=None, failure=Failed(kind="policy", stage="run", why="gone")),
        played(turns=0),
        played(sequences=2),
    ],
)
def test_what_is_no_sample_has_no_answer(rollout: Rollout) -> None:
    """H08: a failure is no 0; several sequences do not continue each other."""
    with pytest.raises(AdapterError, match=r"math-1\.0"):
        gym.answer(ROW, rollout)


@pytest.mark.parametrize(
    ("kind", "status"), [("task", 422), ("handler", 422), ("grader", 503), ("policy", 503), ("worker", 503)]
)
def test_a_status_tells_the_row_s_fault_from_the_line_s(kind: str, status: int) -> None:
    failure = Failed(kind=kind, stage="run", why="it broke")
    assert gym.status_of(played(outcome="failed", reward=None, failure=failure)) == status
    assert gym.status_of(played(outcome="cancelled", reward=None)) == 409


def test_a_row_names_its_task_in_one_of_three_ways() -> None:
    whole = gym.task_of({**ROW, "handler": "math", "data": {"question": "q", "expected_answer": "42"}})
    assert (whole.handler, whole.data) == ("math", {"question": "q", "expected_answer": "42"})
    assert whole.sampling == {"temperature": 1.0, "max_tokens": 64}
    bare = gym.task_of({**ROW, "question": "q", "expected_answer": "42"}, handler="math")
    assert bare.data == whole.data
    mapping = DatasetConfig(
        handler="math",
        fields={"question": "responses_create_params.input.user.content", "expected_answer": "metadata.gold"},
    )
    mapped = gym.task_of({**ROW, "metadata": {"gold": "42"}}, dataset=mapping)
    assert mapped.data == {"question": "What is 6 x 7?", "expected_answer": "42"}


def test_each_request_is_a_rollout_of_its_own_and_names_its_group() -> None:
    row = {**ROW, "handler": "echo", "data": {}, "id": "taken"}
    first, second = gym.task_of(row), gym.task_of(row)
    assert first.id != second.id
    assert str(first.id).startswith("7-")
    assert str(gym.task_of({**row, "group": "prompt-3"}).id).startswith("prompt-3-")


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"handler": "echo", "data": {}}, "responses_create_params"),
        ({**ROW, "question": "q"}, "handler"),
        ({**ROW, "handler": 3, "data": {}}, "handler"),
    ],
)
def test_a_wrong_row_is_said(row: dict[str, Any], wrong: str) -> None:
    with pytest.raises(TaskError, match=wrong):
        gym.task_of(row)
