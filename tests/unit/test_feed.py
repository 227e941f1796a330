"""Where a stream's tasks come from, what a checkpoint keeps of it, how what was refused is said."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from pipeline.envelope import Task
from pipeline.errors import ConfigError
from pipeline.feed import Feed, Spot
from pipeline.groups import KEEPS
from pipeline.refusals import name_of, said, why_refused
from pipeline.results import Group, Rollout
from pipeline.stream_state import StreamState


def tasks(count: int, **about: Any) -> list[Task]:
    return [Task(handler="echo", data={"text": str(number)}, **about) for number in range(count)]


def texts(feed: Feed, epoch: int) -> list[str]:
    return [feed.task(Spot(epoch, position)).data["text"] for position in range(feed.length or 0)]


def test_an_order_is_drawn_from_seed_and_epoch_and_is_the_same_in_every_life() -> None:
    first, again, other = (Feed(tasks(20), "s", seed, None) for seed in (1, 1, 2))
    assert texts(first, 0) == texts(again, 0) != texts(first, 1)
    assert texts(first, 0) != texts(other, 0)
    assert sorted(texts(first, 5), key=int) == [str(number) for number in range(20)]
    assert texts(Feed(tasks(3), "s", None, None), 1) == ["0", "1", "2"]


def test_ids_name_stream_epoch_position_and_try() -> None:
    feed = Feed(tasks(3), "s", None, None)
    assert [feed.task(spot).id for spot in (Spot(0, 2), Spot(4, 1), Spot(0, 2).again())] == [
        "s-0-2",
        "s-4-1",
        "s-0-2~1",
    ]
    assert [feed.spot_of(id) for id in ("s-0-2", "s-4-1~3", "s-4-1-a~b-2~3", "t-0-2", "s2-0-2")] == [
        Spot(0, 2), Spot(4, 1, 3), Spot(4, 1, 3), None, None,
    ]  # fmt: skip
    own = Feed(tasks(1, id="row"), "s", None, None)
    assert own.task(Spot(2, 0)).id == "s-2-0-row"


def test_epochs_follow_one_another_and_end() -> None:
    feed = Feed(tasks(2), "s", None, 2)
    assert feed.settle(Spot(0, 1)) == Spot(0, 1)
    assert feed.settle(Spot(0, 2)) == Spot(1, 0)
    assert feed.settle(Spot(1, 2)) is None
    assert Feed(tasks(2), "s", None, None).settle(Spot(98, 2)) == Spot(99, 0)


def test_an_iterator_is_read_when_asked_and_read_over_on_the_way_back() -> None:
    feed = Feed(iter(tasks(4)), "s", None, None)
    assert (feed.length, feed.taken(Spot(0, 0))) == (None, 0)
    assert feed.settle(Spot(0, 0)) == Spot(0, 0)
    feed.skip(3, {1})
    assert feed.task(Spot(0, 1)).data["text"] == "1"
    assert feed.settle(Spot(0, 3)) == Spot(0, 3)
    assert feed.settle(Spot(0, 4)) is None
    assert feed.taken(None) == 4
    with pytest.raises(ConfigError, match="the state is of position 5, and this iterator has 4 tasks"):
        Feed(iter(tasks(4)), "s", None, None).skip(5, set())


@pytest.mark.parametrize(
    ("given", "seed", "epochs", "sentence"),
    [
        (iter(tasks(2)), 1, None, "the tasks are an iterator, which is read once"),
        (iter(tasks(2)), None, 2, "the tasks are an iterator, which is read once"),
        (tasks(2), None, 0, "epochs is 0: it is at least 1"),
        ([], None, None, "the tasks are an empty sequence"),
    ],
)
def test_what_cannot_be_meant_is_said(given: Any, seed: int | None, epochs: int | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Feed(given, "s", seed, epochs)


def test_a_name_leaves_room_for_what_follows() -> None:
    with pytest.raises(ConfigError, match="it has at most 100 printable characters"):
        Feed(tasks(2), "s" * 101, None, None)


def test_a_dataset_of_another_library_needs_no_base_class() -> None:
    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, at: int) -> Task:
            return tasks(3)[at]

    assert texts(Feed(Rows(), "s", None, 1), 0) == ["0", "1", "2"]  # type: ignore[arg-type]


def state(**changes: Any) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": "s", "seed": 1, "samples": 4, "length": 3, "epochs": 5, "cursor": Spot(1, 2),
        "in_flight": [Spot(1, 0), Spot(0, 2, 1)], "trained": {"b", "a"}, "early": {"c"}, "read": 0,
    }  # fmt: skip
    return StreamState(**about).to_map() | changes


def test_a_state_survives_json() -> None:
    found = StreamState.of(json.loads(json.dumps(state())))
    assert (found.cursor, found.in_flight) == (Spot(1, 2), [Spot(0, 2, 1), Spot(1, 0)])
    assert (found.trained, found.early) == (["a", "b"], ["c"])
    assert StreamState.of(state(cursor=None)).cursor == Spot(5, 0), "all five epochs are over; a sixth may follow"
    assert StreamState.of(state(cursor=None, length=None)).cursor is None
    found.check(Feed(tasks(3), "t", 1, None), 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"form": 9}, "its form is 9, not 1"),
        ({"cursor": [1]}, "the state of the stream is damaged"),
        ({"length": 4}, "the number of tasks was 4 and is 3"),
        ({"seed": 2}, "seed was 2 and is 1"),
        ({"samples": 8}, "samples was 8 and is 4"),
    ],
)
def test_a_state_of_another_stream_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StreamState.of(state(**changes)).check(Feed(tasks(3), "s", 1, None), 4)


def group(*rewards: float | None) -> Group:
    return Group(
        "g",
        tuple(
            Rollout(id=f"g.{n}", group="g", sample=n, samples=len(rewards), lane="train", reward=reward,
                    outcome="failed" if reward is None else "scored")
            for n, reward in enumerate(rewards)
        ),
    )  # fmt: skip


def test_what_was_refused_is_said() -> None:
    assert [why_refused(group(*rewards)) for rewards in ((), (None, 1.0), (1.0, 1.0), (0.0, 1.0))] == [
        "no scored member", "one scored member", "all rewards equal 1.0", "rewards that differ",
    ]  # fmt: skip
    reasons = Counter({"no scored member": 1, "all rewards equal 1.0": 3})
    sentence = "4 groups were refused by keep='spread': 3 with all rewards equal 1.0; 1 with no scored member"
    assert said(reasons, KEEPS["spread"]) == sentence

    def mine(_: Group) -> bool:
        return False

    assert name_of(mine) == "mine"
