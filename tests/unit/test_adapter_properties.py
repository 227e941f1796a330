"""In every adapter, for any group: equal lengths, ids verbatim, mask 0 unless sampled, failures never counted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from pipeline.adapters import prime_rl, skyrl, slime, trl, verl
from pipeline.adapters.padded import flat, padded
from pipeline.adapters.rows import AdapterError, Row, members, rows_of, usable, usable_rows
from pipeline.results import Group, Rollout
from tests.unit.adapted import groups

FILLER = 3


def ordered(found: list[Group]) -> list[Rollout]:
    return [rollout for group in found for rollout in members(group)]


def expected(found: list[Group]) -> list[Row | None]:
    """The rows of all rollouts in order, None in the place of one that may not be trained on."""
    return [row for rollout in ordered(found) for row in (rows_of(rollout) if usable(rollout) else [None])]


def same_tokens(row: Row | None, prompt: Any, response: Any, mask: Any, logprobs: Any) -> None:
    """Plain lists, equally long over the response, with the sequence's ids; only what was sampled has mask 1."""
    assert len(response) == len(mask) == len(logprobs)
    assert {type(item) for item in [*prompt, *response, *mask]} <= {int}
    assert {type(item) for item in logprobs} <= {float}
    if row is None:
        assert (prompt, response, mask, logprobs) == ([FILLER], [FILLER], [0], [0.0])
        return
    assert [*prompt, *response] == row.sequence.token_ids.tolist()
    whole = [0] * len(prompt) + mask
    assert whole == row.sequence.loss_mask.tolist()
    assert mask[0] == 1, "the response begins with what was sampled first"
    assert [0.0] * len(prompt) + logprobs == row.sequence.logprobs.tolist()
    assert all(value == 0.0 for value, sampled in zip(logprobs, mask, strict=True) if not sampled)


def nan_mean(rewards: list[float | None]) -> float | None:
    counted = [reward for reward in rewards if reward is not None]
    return float(np.mean(counted)) if counted else None


@settings(max_examples=40)
@given(found=groups())
def test_trl(found: list[Group]) -> None:
    several = next((item for item in ordered(found) if usable(item) and len(rows_of(item)) > 1), None)
    if several is not None:
        with pytest.raises(AdapterError, match=f"rollout {several.id} has "):
            trl.rollout_rows(found, filler=FILLER)
        return
    output = trl.rollout_rows(found, filler=FILLER)
    rollouts = ordered(found)
    assert {len(values) for values in output.values()} == {len(rollouts)}
    assert output["rollout_id"] == [rollout.id for rollout in rollouts]
    columns = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    for row, *parts in zip(expected(found), *(output[name] for name in columns), strict=True):
        same_tokens(row, *parts)
    for group in found:
        ours = [reward for reward, id in zip(output["reward"], output["group"], strict=True) if id == group.id]
        assert nan_mean(ours) == pytest.approx(group.mean)
    json.dumps(output)


@settings(max_examples=40)
@given(found=groups())
def test_verl(found: list[Group]) -> None:
    for rollout in ordered(found):
        if not usable(rollout):
            with pytest.raises(AdapterError, match=f"rollout {rollout.id} can't be trained on"):
                verl.agent_loop_output(rollout)
            continue
        outputs = verl.agent_loop_output(rollout, parts=["part", "other"])
        for row, output in zip(rows_of(rollout), outputs, strict=True):
            names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
            same_tokens(row, *(output[name] for name in names))
            assert output["reward_score"] == rollout.reward
            assert output["extra_fields"]["rollout_id"] == rollout.id
            assert list(output["extra_fields"]["reward_extra_info"]) == ["score", "truncated", "part", "other"]
            oldest, newest = row.versions
            assert output["extra_fields"]["min_global_steps"] == oldest
            assert output["extra_fields"]["max_global_steps"] == newest
            short = verl.agent_loop_output(rollout, response_length=1)[row.index]
            assert len(short["response_ids"]) == sum(short["response_mask"]) == len(short["response_logprobs"]) == 1
        json.dumps(outputs)


@settings(max_examples=40)
@given(found=groups())
def test_slime(found: list[Group]) -> None:
    nested = slime.to_samples(found, many="split", filler=FILLER)
    assert [len(inner) for inner in nested] == [len(group.rollouts) for group in found]
    flattened = [sample for inner in nested for item in inner for sample in item]
    for row, sample in zip(expected(found), flattened, strict=True):
        cut = len(sample["tokens"]) - sample["response_length"]
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
        same_tokens(
            row, sample["tokens"][:cut], sample["tokens"][cut:], sample["loss_mask"], sample["rollout_log_probs"]
        )
        assert sample["remove_sample"] is (row is None)
        assert type(sample["reward"]) is float
        assert all(isinstance(version, str) for version in sample["weight_versions"])
    for group, inner in zip(found, nested, strict=True):
        assert len({sample["group_index"] for item in inner for sample in item}) == 1
        assert all(len({sample["rollout_id"] for sample in item}) == 1 for item in inner)
        once = [item[0]["reward"] for item in inner]
        assert np.mean(once) == pytest.approx(group.mean or 0.0)
    assert len({sample["rollout_id"] for sample in flattened}) == len(ordered(found))
    json.dumps(nested)


@settings(max_examples=40)
@given(found=groups())
def test_skyrl(found: list[Group]) -> None:
    output = skyrl.generator_output(ordered(found), filler=FILLER, many="split")
    skyrl.check(output, num_prompts=len(ordered(found)), step_wise=True)
    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    for row, *parts in zip(expected(found), *(output[name] for name in columns), strict=True):
        same_tokens(row, *parts)
    totals: dict[str, dict[str, float]] = {}
    for id, reward in zip(output["trajectory_ids"], output["rewards"], strict=True):
        of_group = totals.setdefault(id.instance_id, {})
        of_group[id.to_string()] = of_group.get(id.to_string(), 0.0) + reward
    for group in found:
        assert np.mean(list(totals[group.id].values())) == pytest.approx(group.mean or 0.0), "each rollout counts once"
    for rollout in ordered(found):
        stops = {
            stop
            for id, stop in zip(output["trajectory_ids"], output["stop_reasons"], strict=True)
            if id.to_string() == f"{rollout.group}_{rollout.sample}"
        }
        scored = "length" if rollout.truncated else "stop"
        assert stops == {scored if rollout.outcome == "scored" else "abort"}


@settings(max_examples=40)
@given(found=groups())
def test_prime_rl(found: list[Group]) -> None:
    samples = prime_rl.training_samples(found)
    wanted = [row for row in expected(found) if row is not None]
    for row, sample in zip(wanted, samples, strict=True):
        prompt = row.prompt
        mask = [int(value) for value in sample["mask"][prompt:]]
        same_tokens(row, sample["token_ids"][:prompt], sample["token_ids"][prompt:], mask, sample["logprobs"][prompt:])
        lengths = {len(sample[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")}
        assert lengths == {len(row.sequence)}
        assert {type(value) for value in sample["mask"]} <= {bool}
        assert all(value > 0.0 for value in sample["temperatures"])
        assert all(sampled or value == 0.0 for value, sampled in zip(sample["advantages"], sample["mask"], strict=True))
    json.dumps(samples)


def labels(row: Row) -> npt.NDArray[np.int32]:
    found = np.full(len(row.sequence), -1, np.int32)
    for run in row.sequence.versions:
        found[run.start : run.end] = run.version
    return found


@settings(max_examples=40)
@given(found=groups())
def test_padded_and_flat(found: list[Group]) -> None:
    chosen = usable_rows(found)
    assert chosen == [row for row in expected(found) if row is not None]
    wide, ends = padded(chosen, pad=FILLER), flat(chosen)
    assert int(wide.response_mask.sum()) == int(ends.loss_mask.sum()) == sum(int(row.mask.sum()) for row in chosen)
    assert not wide.logprobs[~wide.response_mask].any() and not ends.logprobs[~ends.loss_mask].any()
    assert bool(((wide.versions >= 0) == wide.response_mask).all())
    assert int(wide.attention_mask.sum()) == len(ends.token_ids) == int(ends.cu_seqlens[-1])
    left = wide.prompts.shape[1]
    for at, row in enumerate(chosen):
        whole = slice(left - row.prompt, left - row.prompt + len(row.sequence))
        assert np.array_equal(wide.input_ids[at, whole], row.sequence.token_ids)
        assert wide.attention_mask[at, whole].all() and wide.attention_mask[at].sum() == len(row.sequence)
        assert np.array_equal(wide.position_ids[at, whole], np.arange(len(row.sequence)))
        assert np.array_equal(wide.response_mask[at, : len(row.response_ids)], row.mask.astype(bool))
        assert np.array_equal(wide.versions[at, : len(row.response_ids)], labels(row)[row.prompt :])
        span = slice(ends.cu_seqlens[at], ends.cu_seqlens[at + 1])
        assert np.array_equal(ends.token_ids[span], row.sequence.token_ids)
        assert np.array_equal(ends.loss_mask[span], row.sequence.loss_mask.astype(bool))
        assert np.array_equal(ends.logprobs[span], row.sequence.logprobs)
        assert np.array_equal(ends.versions[span], labels(row))
