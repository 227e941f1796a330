"""How a batch is dealt out to a trainer's processes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from pipeline.adapters.distributed import balanced, shard, shard_rows
from pipeline.adapters.rows import rows
from pipeline.builder import TrajectoryBuilder
from pipeline.errors import Incomplete
from pipeline.results import Group, Rollout


@given(st.lists(st.integers(0, 32_768), max_size=60), st.integers(1, 9))
def test_each_index_goes_to_one_part_and_no_part_has_much_more(sizes: list[int], parts: int) -> None:
    dealt = balanced(sizes, parts)
    assert sorted(index for part in dealt for index in part) == list(range(len(sizes)))
    sums = [sum(sizes[index] for index in part) for part in dealt]
    assert max(sums) - min(sums) <= max(sizes, default=0)


@given(st.lists(st.integers(0, 32_768), min_size=1, max_size=8), st.integers(1, 6))
def test_equal_parts_have_equal_counts(sizes: list[int], parts: int) -> None:
    dealt = balanced(sizes * parts, parts, equal=True)
    assert {len(part) for part in dealt} == {len(sizes)}


def test_what_does_not_come_out_even_is_said() -> None:
    with pytest.raises(ValueError, match="5 do not come out even over 2 ranks"):
        balanced([1] * 5, 2, equal=True)
    with pytest.raises(ValueError, match="0 parts"):
        balanced([1], 0)


def group(name: str, *lengths: int) -> Group:
    def one(sample: int, length: int) -> Rollout:
        builder = TrajectoryBuilder()
        builder.prompt([1, 2])
        builder.action(list(range(length - 2)), [0.0] * (length - 2), [(0, 0, length - 2)], finish_reason="stop")
        about = {"id": f"{name}.{sample}", "group": name, "sample": sample, "samples": len(lengths), "lane": "train"}
        return Rollout(**about, outcome="scored", reward=1.0, trajectory=builder.build() if length else None)  # type: ignore[arg-type]

    return Group(name, tuple(one(sample, length) for sample, length in enumerate(lengths)))


def test_groups_stay_whole_and_rows_are_spread() -> None:
    groups = [group("a", 10, 10), group("b", 3, 3), group("c", 6, 6), group("d", 9, 9)]
    parts = [[item.id for item in shard(groups, rank, 2)] for rank in range(2)]
    assert parts == [["a", "b"], ["c", "d"]] or parts == [["a", "c"], ["b", "d"]]
    assert parts == [[item.id for item in shard(groups, rank, 2)] for rank in range(2)], "each rank computes the same"

    flat = rows(rollout for item in groups for rollout in item.rollouts)
    halves = [shard_rows(flat, rank, 2, equal=True) for rank in range(2)]
    assert [sum(len(row.sequence) for row in half) for half in halves] == [28, 28]


def test_an_incomplete_batch_travels_with_all_that_it_says() -> None:
    error = Incomplete("7 of 8 came", batch=[group("a", 4)], wanted=8, got=7, missing={"b.0": "in work"})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.wanted, again.got, again.missing) == ("7 of 8 came", 8, 7, {"b.0": "in work"})
