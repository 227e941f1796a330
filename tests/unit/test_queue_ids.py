"""Finished rollouts are leased by their ids: only those that wait, once, and the rest of the lane stays as it is."""

from __future__ import annotations

import pytest

from pipeline.queue import Queue
from tests import line


async def test_only_what_has_ended_and_is_asked_for_is_leased(queue: Queue) -> None:
    done = await line.put(queue, "done", 3)
    await line.through(queue, 3)
    late = await line.put(queue, "late", 1)

    popped = await queue.pop_ids([done[1], *late, "nobody.0"], "a", 60.0)
    assert [item.id for item in popped] == [done[1]]
    assert await line.state(queue, done[1]) == ("done", "leased")
    assert await queue.pop_ids([done[1]], "b", 60.0) == []
    assert sorted(item.id for item in await queue.pop("train", 5, "b", 60.0)) == [done[0], done[2]]
    assert await queue.take(popped) == ["OK"]


async def test_the_same_request_again_gets_the_same_leases(queue: Queue) -> None:
    """redis-py may send a command whose reply was lost a second time."""
    ids = await line.put(queue, samples=2)
    await line.through(queue, 2)
    first = await queue.pop_ids(ids, "a", 60.0, nonce="n")
    assert await queue.pop_ids(ids, "a", 60.0, nonce="n") == first
    assert len(first) == 2
    assert await queue.take(first) == ["OK", "OK"]
    assert await line.leftovers(queue) == []


async def test_a_group_is_whole_again_when_its_member_comes_back(queue: Queue) -> None:
    ids = await line.put(queue, samples=2)
    await line.through(queue, 2)
    one = await queue.pop_ids(ids[:1], "a", 60.0)
    assert await queue.pop_groups("train", 1, "b", 60.0) == []
    assert await queue.hand_back(one) == 1
    ((group, members),) = await queue.pop_groups("train", 1, "b", 60.0)
    assert (group, sorted(item.id for item in members)) == ("g", ids)


@pytest.mark.parametrize("gone", ["silence", "leave"])
async def test_a_lease_that_runs_out_gives_it_back(queue: Queue, gone: str) -> None:
    (id,) = await line.put(queue)
    await line.through(queue)
    popped = await queue.pop_ids([id], "a", 60.0)
    if gone == "silence":
        await line.silence(queue, "done", id)
        await queue.tick()
    else:
        await queue.hand_back(popped)
    assert [item.id for item in await queue.pop_ids([id], "b", 60.0)] == [id]
    assert await queue.take(popped) == ["STALE"]
