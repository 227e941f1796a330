"""Trajectories: what the builder makes holds the invariants, and what breaks one is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pipeline import wire
from pipeline.builder import TrajectoryBuilder
from pipeline.errors import EnvelopeError, TrajectoryError
from pipeline.trajectory import Trajectory
from tests.unit import strategies as made


@given(made.builders())
def test_what_is_built_holds_the_invariants(builder: TrajectoryBuilder) -> None:
    trajectory = builder.build()
    for sequence in trajectory.sequences:
        sequence.check()
        size = len(sequence)
        assert len(sequence.loss_mask) == len(sequence.logprobs) == size
        assert (sequence.logprobs[sequence.loss_mask == 0] == 0.0).all()
        assert sum(turn.end - turn.start for turn in sequence.turns) == size
        assert sum(run.end - run.start for run in sequence.versions) == int(sequence.loss_mask.sum())
    assert trajectory.sampled == sum(
        turn.end - turn.start for sequence in trajectory.sequences for turn in sequence.turns if turn.kind == "action"
    )
    assert trajectory.turns == builder.actions


@given(made.trajectories())
def test_a_trajectory_comes_back(trajectory: Trajectory) -> None:
    back = Trajectory.from_wire(wire.expand(wire.compress(trajectory.to_wire())))
    assert made.same(back.to_wire(), trajectory.to_wire())
    assert len(back) == len(trajectory)


@given(made.trajectories())
def test_unknown_fields_survive_everywhere(trajectory: Trajectory) -> None:
    later: Any = trajectory.to_wire()
    later["later"] = 1
    for sequence in later["sequences"]:
        sequence["later"] = {"a": 2}
        for turn in sequence["turns"]:
            turn["later"] = [3]
    assert made.same(Trajectory.from_wire(wire.unpack(wire.pack(later))).to_wire(), later)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a wire map that can be overwritten."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            found += places(item, (*path, at))
    return found


@given(made.trajectories(), st.data())
def test_a_wrong_value_anywhere_is_an_envelope_error_or_kept_as_it_is(
    trajectory: Trajectory, data: st.DataObject
) -> None:
    value: Any = wire.unpack(wire.pack(trajectory.to_wire()))
    path = data.draw(st.sampled_from(places(value)))
    inner = value
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = data.draw(made.plain | made.arrays)
    try:
        back = Trajectory.from_wire(value)
    except EnvelopeError as error:
        assert str(error)
    else:
        for sequence in back.sequences:
            sequence.check()


def three() -> TrajectoryBuilder:
    builder = TrajectoryBuilder()
    builder.prompt([1, 2])
    builder.action([3, 4, 5], [-0.1, -0.2, -0.3], [(7, 0, 2), (8, 2, 3)], finish_reason="stop")
    builder.observation([6])
    return builder


def test_a_turn_after_turn_is_one_sequence() -> None:
    builder = three()
    builder.action([9], [-0.5], [(8, 0, 1)], prompt_ids=[1, 2, 3, 4, 5, 6])
    (sequence,) = builder.build().sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert sequence.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert sequence.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, -0.5])
    assert [tuple(run) for run in sequence.versions] == [(7, 2, 4), (8, 4, 5), (8, 6, 7)]
    assert [(turn.kind, turn.start, turn.end) for turn in sequence.turns] == [
        ("prompt", 0, 2), ("action", 2, 5), ("observation", 5, 6), ("action", 6, 7),
    ]  # fmt: skip


def test_runs_of_one_version_that_touch_are_one() -> None:
    builder = TrajectoryBuilder()
    builder.action([1, 2], [-1, -1], [(3, 0, 1), (3, 1, 2)])
    assert [tuple(run) for run in builder.build().sequences[0].versions] == [(3, 0, 2)]


def test_a_new_sequence_keeps_the_old_one() -> None:
    builder = three()
    builder.begin()
    builder.prompt([1])
    trajectory = builder.build()
    assert [len(sequence) for sequence in trajectory.sequences] == [6, 1]
    assert (trajectory.sampled, trajectory.turns, trajectory.version_range) == (3, 1, (7, 8))


def test_nothing_sampled_has_no_versions() -> None:
    builder = TrajectoryBuilder()
    builder.prompt([1])
    assert builder.build().version_range is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "more", "sentence"),
    [
        ([1, 2], [-1.0], [(0, 0, 2)], {}, "2 ids and 1 logprobs"),
        ([1], [float("nan")], [(0, 0, 1)], {}, "logprob 0 of 1 is nan"),
        ([1, 2], [0.0, float("-inf")], [(0, 0, 2)], {}, "logprob 1 of 2 is -inf"),
        ([1], [1e300], [(0, 0, 1)], {}, "logprob 0 of 1"),
        ([1, 2], [0.0, 0.0], [(0, 0, 1)], {}, "cover 1 of 2 sampled ids"),
        ([1, 2], [0.0, 0.0], [(0, 1, 2)], {}, "covers 1:2, expected a run from 0"),
        ([1, 2], [0.0, 0.0], [(0, 0, 0), (0, 0, 2)], {}, "covers 0:0"),
        ([-1], [0.0], [(0, 0, 1)], {}, "no token ids"),
        ([2**32], [0.0], [(0, 0, 1)], {}, "no token ids"),
        (
            [9],
            [0.0],
            [(0, 0, 1)],
            {"prompt_ids": [1, 2, 3, 4, 5, 7]},
            "the prompt of 6 ids is not the sequence's 6 ids",
        ),
        ([9], [0.0], [(0, 0, 1)], {"prompt_ids": [1, 2]}, "the prompt of 2 ids is not the sequence's 6 ids"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_an_action_that_does_not_fit_is_refused_whole(
    ids: list[int], logprobs: list[float], versions: list[tuple[int, int, int]], more: dict[str, Any], sentence: str
) -> None:
    builder = three()
    before = builder.build().to_wire()
    with pytest.raises(TrajectoryError, match=sentence):
        builder.action(ids, logprobs, versions, **more)
    assert made.same(builder.build().to_wire(), before)


def changed(**fields: Any) -> dict[str, Any]:
    value = three().build().to_wire()
    value["sequences"][0].update(fields)
    return value


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"loss_mask": np.zeros(5, np.uint8)}, "loss_mask has 5 entries for 6 token ids"),
        ({"loss_mask": np.ones(6, np.uint8)}, "token 0 has mask 1 but the turns say otherwise"),
        ({"loss_mask": np.full(6, 2, np.uint8)}, "is neither 0 nor 1"),
        ({"logprobs": np.full(6, np.nan, np.float32)}, "logprob 0 of 6 is not finite"),
        ({"logprobs": np.full(6, -1, np.float32)}, "not sampled has a logprob other than 0.0"),
        ({"versions": [[7, 2, 4]]}, "version runs must cover the sampled tokens exactly"),
        ({"versions": [[7, 2, 9]]}, "out of order or bounds"),
        ({"versions": [[7, 2]]}, "this is no sequence"),
        ({"turns": []}, "the turns end at 0, the sequence at 6"),
        ({"turns": [{"kind": "answer", "start": 0, "end": 6}]}, "turn kind 'answer' is unknown"),
        ({"turns": [{"kind": "prompt", "start": 1, "end": 6}]}, "the one before it ends at 0"),
        ({"turns": [{"kind": "prompt", "start": False, "end": 6}]}, "False is no integer"),
        ({"turns": [{"kind": "prompt", "start": 0, "end": "6"}]}, "a turn's end is '6'"),
        ({"turns": [{"kind": "prompt", "start": 0, "end": 6, "seconds": None}]}, "a turn's seconds is None"),
        ({"turns": [{"start": 0, "end": 6}]}, "this is no sequence"),
        ({"turns": [{"kind": "prompt", "end": 6}]}, "this is no sequence"),
        ({"turns": ["prompt"]}, "a turn is a str"),
        ({"per_token": {"experts": [np.zeros(5, np.uint8), [2]]}}, "experts has 5 values for 6 tokens of shape"),
        ({"token_ids": np.zeros(6, np.int64)}, "expected a uint32 array, found an array of int64"),
        ({"token_ids": [1, 2]}, "expected a uint32 array, found list"),
    ],
)
def test_a_broken_invariant_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvelopeError, match=sentence):
        Trajectory.from_wire(changed(**fields))


def test_per_token_arrays_travel_with_their_shape() -> None:
    value = changed(per_token={"experts": [np.arange(24, dtype=np.uint16), [2, 2]]})
    (sequence,) = Trajectory.from_wire(wire.unpack(wire.pack(value))).sequences
    assert (sequence.per_token["experts"].shape, sequence.per_token["experts"].width) == ((2, 2), 4)


def test_eval_sees_the_finished_trajectory() -> None:
    trajectory = three().build()
    assert made.same(TrajectoryBuilder.of(trajectory).build().to_wire(), trajectory.to_wire())
