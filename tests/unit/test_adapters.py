"""What each trainer gets for the golden groups, written down by hand, and what an adapter refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.adapters import prime_rl, skyrl, slime, trl, verl
from pipeline.adapters.rows import AdapterError, members, usable_rows
from pipeline.builder import TrajectoryBuilder
from pipeline.results import Failed, Group, Rollout
from tests.golden_groups import golden, golden_groups

G1, G2 = golden_groups()


def text(ids: list[int]) -> str:
    return f"<{' '.join(map(str, ids))}>"


def test_trl() -> None:
    assert trl.rollout_rows([G1], filler=0) == golden("trl")


def test_trl_refuses_several_sequences_by_the_rollouts_id() -> None:
    with pytest.raises(AdapterError, match=r"rollout g2\.0 has 2 sequences"):
        trl.rollout_rows([G1, G2], filler=0)


def test_trls_reward_function_hands_on_what_was_forwarded() -> None:
    found = trl.rollout_rows([G1], filler=0)
    forwarded = {name: found[name] for name in found.keys() - {"prompt_ids", "completion_ids", "logprobs", "env_mask"}}
    rewards = trl.rollout_reward(prompts=[], completions=[], completion_ids=found["completion_ids"], **forwarded)
    assert rewards == [1.0, 0.0, 1.0, None]
    assert nan_mean(rewards) == pytest.approx(2 / 3)


@pytest.mark.parametrize("at", [0, 2])
def test_verl(at: int) -> None:
    rollout = G1.rollouts[at]
    assert verl.agent_loop_output(rollout, parts=["exact"]) == golden("verl")[rollout.id]


def test_verl_splits_several_sequences() -> None:
    first, second = verl.agent_loop_output(G2.rollouts[0])
    assert (first["prompt_ids"], first["response_ids"]) == ([1, 2], [3])
    assert (second["prompt_ids"], second["response_ids"]) == ([1, 4], [5, 6])
    assert first["reward_score"] == second["reward_score"] == 0.5
    told = [
        (item["extra_fields"]["sequence_index"], item["extra_fields"]["sequence_count"]) for item in (first, second)
    ]
    assert told == [(0, 2), (1, 2)]
    assert [item["extra_fields"]["max_global_steps"] for item in (first, second)] == [4, 5]


def test_verl_fails_the_session_of_a_rollout_without_a_reward() -> None:
    """So that verl counts its reward nowhere: a 0 would pull the group's mean down."""
    with pytest.raises(AdapterError, match=r"g1\.3 can't be trained on: it failed in run, sandbox: its sandbox died"):
        verl.agent_loop_output(G1.rollouts[3])
    with pytest.raises(AdapterError, match=r"g2\.1 can't be trained on: it was cancelled in run, closed"):
        verl.agent_loop_output(G2.rollouts[1])


def test_verl_cuts_a_long_response_and_says_so() -> None:
    [cut] = verl.agent_loop_output(G1.rollouts[0], response_length=4)
    assert cut["response_ids"] == [8, 9, 10, 11]
    assert cut["response_mask"] == [1, 1, 0, 0]
    assert cut["response_logprobs"] == [-0.5, -0.25, 0.0, 0.0]
    assert cut["extra_fields"]["max_global_steps"] == 3, "version 4 sampled nothing that is left"
    assert cut["extra_fields"]["truncation"] == "response_length"
    assert cut["extra_fields"]["reward_extra_info"] == {"score": 1.0, "truncated": 1.0}


def test_verls_turns_are_messages() -> None:
    """Each action is one; what was shown in several pieces in a row is one."""
    builder = TrajectoryBuilder()
    builder.prompt([1])
    builder.prompt([2])
    builder.action([3], [-1.0], [(0, 0, 1)])
    builder.action([4], [-1.0], [(0, 0, 1)])
    builder.observation([5])
    builder.observation([6])
    builder.action([7], [-1.0], [(0, 0, 1)])
    [output] = verl.agent_loop_output(replace(G1.rollouts[0], trajectory=builder.build()))
    assert output["num_turns"] == 5


def test_verl_refuses_a_long_prompt() -> None:
    with pytest.raises(AdapterError, match=r"g1\.0 has a prompt of 3 tokens and verl's limit is 2"):
        verl.agent_loop_output(G1.rollouts[0], prompt_length=2)


def test_slime() -> None:
    assert slime.to_samples([G1, G2], many="split", decode=text) == golden("slime")


def test_slime_without_splitting_has_one_sample_a_rollout() -> None:
    [inner] = slime.to_samples([G1], decode=text)
    assert inner == [item[0] for item in golden("slime")[0]]
    with pytest.raises(AdapterError, match=r"rollout g2\.0 has 2 sequences"):
        slime.to_samples([G2])


@dataclass
class Sample:
    """The fields of slime's that are filled, and one that is not."""

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class OlderSample:
    tokens: list[int]
    metadata: dict[str, Any]


def test_slimes_own_class_is_filled() -> None:
    [inner] = slime.to_samples([G1], Sample)
    assert [sample.status for sample in inner] == [
        Sample.Status.COMPLETED, Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED,
    ]  # fmt: skip
    assert inner[0].tokens == [5, 6, 7, 8, 9, 10, 11, 12]


def test_a_class_without_rollout_id_takes_no_siblings() -> None:
    assert slime.to_samples([G1], OlderSample)[0][1].tokens == [5, 6, 7, 8]
    with pytest.raises(
        AdapterError, match=r"rollout g2\.0 has several sequences, and this OlderSample has no rollout_id"
    ):
        slime.to_samples([G2], OlderSample, many="split")


def settings(estimator: str = "grpo", std: bool = False, on: bool = True) -> SimpleNamespace:
    return SimpleNamespace(advantage_estimator=estimator, rewards_normalization=on, grpo_std_normalization=std)


def test_slimes_rewards_count_each_rollout_once_and_failures_never() -> None:
    nested = slime.to_samples([G1, G2], Sample, many="split")
    flattened = [sample for inner in nested for item in inner for sample in item]
    raw, relative = slime.post_process_rewards(settings(), flattened)
    assert raw == pytest.approx([1, 0, 1, 2 / 3, 0.5, 0.5, 0.5])
    assert relative == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0, 0, 0, 0])
    deviation = np.std([1, 0, 1], ddof=1)
    _, divided = slime.post_process_rewards(settings(std=True), flattened)
    assert divided[:4] == pytest.approx([1 / 3 / deviation, -2 / 3 / deviation, 1 / 3 / deviation, 0], rel=1e-5)
    assert slime.post_process_rewards(settings(on=False), flattened) == (raw, raw)
    assert slime.post_process_rewards(settings("ppo"), flattened) == (raw, raw)


def test_skyrl() -> None:
    found = skyrl.generator_output([*G1.rollouts, *G2.rollouts], filler=0, many="split")
    skyrl.check(found, num_prompts=6, step_wise=True)
    found["trajectory_ids"] = [id.to_string() for id in found["trajectory_ids"]]
    assert found == golden("skyrl")


def test_skyrl_in_the_order_of_the_input_under_its_own_ids() -> None:
    ids = ["b", "a", "d", "c"]
    found = skyrl.generator_output([G1.rollouts[at] for at in (1, 0, 3, 2)], filler=0, ids=ids)
    skyrl.check(found, num_prompts=4)
    assert found["trajectory_ids"] == ids
    assert found["response_ids"] == [[8], [8, 9, 10, 11, 12], [0], [13, 14]]
    assert found["is_last_step"] is None
    with pytest.raises(AdapterError, match="4 rollouts for 3 trajectory ids"):
        skyrl.generator_output(G1.rollouts, filler=0, ids=ids[:3])
    with pytest.raises(AdapterError, match=r"rollout g2\.0 has 2 sequences"):
        skyrl.generator_output(G2.rollouts, filler=0)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({name: [] for name in skyrl.PER_ROW}, "no row"),
        ({"response_ids": [[8]]}, "1 rows for 6 prompts"),
        ({"stop_reasons": ["stop"]}, "stop_reasons has 1 entries for 7 rows"),
        ({"loss_masks": [[1]] * 7}, "loss_masks of row 0 has 1 entries for 5 response ids"),
        ({"rollout_logprobs": [[0.0]] * 7}, "rollout_logprobs of row 0 has 1 entries for 5"),
        ({"rewards": [[1.0]] * 7}, "rewards of row 0 has 1 entries for 5"),
        ({"rewards": [[0.0] * 5, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]}, "mix numbers and lists"),
        ({"is_last_step": None}, "needs is_last_step"),
        ({"is_last_step": [True] * 7}, "row 4 of trajectory g2_0: is_last_step is True, expected False"),
        ({"is_last_step": [True] * 4 + [False, True, False]}, "row 6 of trajectory g2_1: is_last_step is False"),
        ({"trajectory_ids": ["a", "b", "a", "c", "d", "d", "e"]}, "row 2: trajectory a goes on after another"),
    ],
)  # fmt: skip
def test_what_skyrl_would_refuse_is_refused(broken: dict[str, Any], said: str) -> None:
    output = golden("skyrl") | broken
    with pytest.raises(AdapterError, match=said):
        skyrl.check(output, num_prompts=6, step_wise="rows for" not in said)


def test_prime_rl() -> None:
    assert prime_rl.training_samples([G1, G2]) == golden("prime_rl")


def test_prime_rl_with_another_advantage_and_name() -> None:
    [first, *_] = prime_rl.training_samples([G1], env_name="math", advantage=lambda group, rollout: 2.0)
    assert first["env_name"] == "math"
    assert first["advantages"] == [0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 2.0]
    with pytest.raises(AdapterError, match=r"rollout g2\.0 has 2 sequences"):
        prime_rl.training_samples([G2], many="refuse")
    with pytest.raises(AdapterError, match=r"rollout g1\.3 has no reward"):
        prime_rl.above_mean(G1, G1.rollouts[3])


def test_prime_rl_refuses_greedy_turns() -> None:
    [rollout, *_] = G1.rollouts
    assert rollout.trajectory is not None
    [sequence] = rollout.trajectory.sequences
    turns = tuple(replace(turn, sampling=turn.sampling and {"temperature": 0.0}) for turn in sequence.turns)
    greedy = replace(rollout, trajectory=replace(rollout.trajectory, sequences=(replace(sequence, turns=turns),)))
    with pytest.raises(AdapterError, match=r"rollout g1\.0 was sampled at temperature 0\.0"):
        prime_rl.training_samples([Group("g1", (greedy,))])


def cut(sample: int) -> Rollout:
    closed = Failed(kind="closed", stage="run", why="its group closed")
    return Rollout(
        id=f"g1.{sample}", group="g1", sample=sample, samples=6, lane="train", outcome="cancelled", failure=closed
    )


def test_a_group_of_more_members_gives_the_scored_ones_first() -> None:
    moved = [replace(rollout, id=f"g1.{at}", sample=at) for at, rollout in enumerate(G1.rollouts, 1)]
    group = Group("g1", (cut(5), *moved, cut(0)), wanted=3)
    assert [rollout.id for rollout in members(group)] == [f"g1.{at}" for at in range(6)]
    assert [rollout.id for rollout in members(group, 3)] == ["g1.1", "g1.2", "g1.3"]
    assert trl.rollout_rows([group], filler=0, samples=3)["rollout_id"] == ["g1.1", "g1.2", "g1.3"]
    assert [len(inner) for inner in slime.to_samples([group], samples=4)] == [4]


def test_a_late_rest_has_no_advantage_of_its_own() -> None:
    """The mean of what ended late is not the group's: the long ones would be measured by the long ones alone."""
    late = replace(G1, late=True)
    with pytest.raises(AdapterError, match="group g1 is the late rest of one that had closed"):
        prime_rl.training_samples([late])
    known = prime_rl.training_samples([late], advantage=lambda group, rollout: float(rollout.reward or 0.0) - 0.5)
    assert len(known) == len(prime_rl.training_samples([G1]))


def test_a_group_of_too_few_members_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"group g1 has 4 members, and this trainer counts on 8 a group"):
        members(G1, 8)
    with pytest.raises(AdapterError, match="the late rest of a group"):
        members(replace(G1, late=True), 8)


def nan_mean(rewards: list[float | None]) -> float:
    return float(np.nanmean([np.nan if reward is None else reward for reward in rewards]))


def test_a_group_that_failed_as_a_whole_is_not_trained_on() -> None:
    """H08: with all four failing there is no valid member, and no reward of 0 either."""
    failed = G1.rollouts[3]
    group = Group("g1", tuple(replace(failed, id=f"g1.{at}", sample=at) for at in range(4)))
    found = trl.rollout_rows([group], filler=7)
    assert found["env_mask"] == [[0]] * 4 and found["reward"] == [None] * 4
    assert found["prompt_ids"] == found["completion_ids"] == [[7]] * 4
    output = skyrl.generator_output(group.rollouts, filler=7)
    skyrl.check(output, num_prompts=4)
    assert output["loss_masks"] == [[0]] * 4 and len(set(output["rewards"])) == 1
    [inner] = slime.to_samples([group])
    assert all(sample["remove_sample"] and sample["loss_mask"] == [0] for sample in inner)
    assert len({sample["reward"] for sample in inner}) == 1, "each advantage is 0"
    assert prime_rl.training_samples([group]) == usable_rows([group]) == []


def test_the_lists_are_plain_python() -> None:
    """numpy's numbers would break json, msgpack and msgspec."""
    json.dumps([
        trl.rollout_rows([G1], filler=0), [verl.agent_loop_output(G1.rollouts[0])], slime.to_samples([G1]),
        prime_rl.training_samples([G1]), skyrl.generator_output(G1.rollouts, filler=0, ids=["a", "b", "c", "d"]),
    ])  # fmt: skip
