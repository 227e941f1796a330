"""The queue's verbs: pop, take, hand back, groups, cancel; and that nothing stays when all is taken."""

from __future__ import annotations

import pytest

from pipeline.leases import Popped
from pipeline.queue import Queue
from tests import line


async def test_pop_takes_the_oldest_group_first_whatever_the_outcome(queue: Queue) -> None:
    await line.put(queue, "old")
    await line.put(queue, "new")
    old, new = await queue.claim("init", 2, "w")
    await line.give_up(queue, new, "init", "fatal")
    await line.give_up(queue, old, "init", "fatal")

    assert [popped.id for popped in await queue.pop("train", 5, "t", 60)] == ["old.0", "new.0"]


async def test_pop_is_by_lane(queue: Queue) -> None:
    await line.put(queue, "a")
    await line.put(queue, "b", lane="eval")
    await line.through(queue, 2)
    assert [popped.id for popped in await queue.pop("eval", 5, "t", 60)] == ["b.0"]
    assert [popped.id for popped in await queue.pop("train", 5, "t", 60)] == ["a.0"]


async def test_the_same_pop_sent_again_gets_the_same(queue: Queue) -> None:
    await line.put(queue, samples=3)
    await line.through(queue, 3)
    first = await queue.pop("train", 2, "t", 60, "nonce")
    assert await queue.pop("train", 2, "t", 60, "nonce") == first
    assert len(await queue.pop("train", 9, "t", 60)) == 1


async def test_a_pop_that_arrives_after_the_next_one_gets_nothing(queue: Queue) -> None:
    await line.put(queue, "a")
    await line.put(queue, "b")
    early, late = queue.nonce(), queue.nonce()
    assert await queue.pop_groups("train", 1, "t", 60, late) == await queue.pop("train", 1, "t", 60, late) == []
    await line.through(queue, 2)

    assert await queue.pop("train", 1, "t", 60, early) == []
    assert await queue.pop_groups("train", 1, "t", 60, early) == []
    assert len(await queue.pop("train", 2, "t", 60, queue.nonce())) == 2


async def test_an_ack_forgets_the_rollout_and_leaves_a_tombstone(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.through(queue, payload=b"data")
    (popped,) = await queue.pop("train", 1, "t", 60)

    assert [await queue.take([popped]) for _ in range(2)] == [["OK"], ["AGAIN"]]
    assert await line.leftovers(queue) == []
    assert [await line.count(queue, name) for name in ("live", "acked")] == [0, 1]
    day = 24 * 3600
    assert day - 60 < await queue.execute("TTL", queue.key("gone", id)) <= day
    await line.put(queue)
    assert await line.count(queue, "enqueued") == 1, "the tombstone refuses a late enqueue"


async def test_an_ack_after_the_lease_is_stale(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.through(queue)
    (first,) = await queue.pop("train", 1, "t1", 60)
    await queue.tick()
    await line.silence(queue, "done", id)
    assert (await queue.tick()).expired == 1
    (second,) = await queue.pop("train", 1, "t2", 60)

    assert await queue.take([first]) == ["STALE"]
    assert await queue.take([second]) == ["OK"]
    assert await queue.take([first]) == ["STALE"]
    assert await line.leftovers(queue) == []


async def test_an_unknown_rollout_is_stale(queue: Queue) -> None:
    assert await queue.take([Popped("never.0", "token")]) == ["STALE"]


async def test_a_consumer_s_beat_keeps_what_it_popped(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.through(queue)
    (popped,) = await queue.pop("train", 1, "t", 60)
    await queue.tick()
    await line.silence(queue, "done", id)
    assert await queue.beat("t", None, [("done", id, popped.token)]) == [1]
    assert (await queue.tick()).expired == 0
    assert await queue.execute("EXISTS", queue.key("beats")) == 0, "a consumer is no worker"


async def test_handed_back_it_is_popped_again_at_once(queue: Queue) -> None:
    await line.put(queue)
    await line.through(queue)
    popped = await queue.pop("train", 1, "t", 60)

    assert [await queue.hand_back(popped) for _ in range(2)] == [1, 0]
    (again,) = await queue.pop("train", 1, "t", 60)
    assert again.id == popped[0].id
    assert again.token != popped[0].token


async def test_a_group_is_popped_whole_once_its_last_member_is_done(queue: Queue) -> None:
    await line.put(queue, "a", 3)
    await line.put(queue, "b", 2)
    claims = await queue.claim("init", 5, "w")
    for claim in claims[1:]:
        await line.give_up(queue, claim, "init", "fatal")
    assert [group for group, _ in await queue.pop_groups("train", 5, "t", 60)] == ["b"]
    await line.give_up(queue, claims[0], "init", "fatal")

    ((group, members),) = await queue.pop_groups("train", 5, "t", 60)

    assert group == "a"
    assert sorted(member.id for member in members) == ["a.0", "a.1", "a.2"]


async def test_the_same_pop_of_groups_sent_again_gets_the_same(queue: Queue) -> None:
    await line.put(queue, "a", 2)
    await line.put(queue, "b", 2)
    await line.through(queue, 4)
    first = await queue.pop_groups("train", 1, "t", 60, "nonce")
    assert await queue.pop_groups("train", 1, "t", 60, "nonce") == first
    assert [group for group, _ in await queue.pop_groups("train", 9, "t", 60)] == ["b"]


async def test_a_group_comes_back_whole(queue: Queue) -> None:
    await line.put(queue, "a", 2)
    await line.through(queue, 2)
    ((_, members),) = await queue.pop_groups("train", 1, "t", 60)
    await queue.hand_back(members)
    ((_, members),) = await queue.pop_groups("train", 1, "t", 60)
    await queue.tick()
    await line.silence(queue, "done", *(member.id for member in members))
    await queue.tick()

    ((_, again),) = await queue.pop_groups("train", 1, "t", 60)

    assert len(again) == 2
    assert await queue.take(again) == ["OK", "OK"]
    assert await line.leftovers(queue) == []


async def test_of_a_group_that_was_popped_singly_the_rest_comes(queue: Queue) -> None:
    await line.put(queue, "a", 3)
    await line.through(queue, 3)
    single = await queue.pop("train", 1, "t", 60)
    assert await queue.pop_groups("train", 1, "t", 60) == [], "one member is in somebody's hands"
    await queue.take(single)
    rest = await queue.pop("train", 5, "t", 60)
    await queue.take(rest)
    assert await line.leftovers(queue) == []


async def test_cancel_of_what_waits(queue: Queue) -> None:
    ids = await line.put(queue, samples=2)
    await line.give_up(queue, await line.one(queue), "init", "attempt", delay=60.0)

    assert await queue.cancel(ids, "enough") == ["REMOVED", "REMOVED"]
    assert await queue.cancel(ids, "enough") == ["DONE", "DONE"]
    for id in ids:
        assert [await line.field(queue, id, name) for name in ("outcome", "kind", "why")] == [
            "cancelled", "cancelled", "enough",
        ]  # fmt: skip
    await line.pop_and_take(queue, 2)
    assert await line.leftovers(queue) == []


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
@pytest.mark.parametrize("end", ["commit", "fail", "die"])
async def test_cancel_of_what_is_in_work(queue: Queue, stage: str, end: str) -> None:
    (id,) = await line.put(queue)
    for before in ("init", "run", "eval"):
        claim = await line.one(queue, before)
        if before == stage:
            break
        await line.pass_on(queue, claim, before, payload=b"kept")

    assert await queue.cancel([id, "never.0"]) == ["ASKED", "NONE"]
    assert await queue.cancel([id]) == ["ASKED"], "sent twice"
    assert await queue.execute("LLEN", queue.key("bell", "worker", "w")) == 2
    if end == "commit":
        assert await line.pass_on(queue, claim, stage, payload=b"dropped") == "CANCELLED"
        assert await line.pass_on(queue, claim, stage, payload=b"dropped") == "AGAIN"
    elif end == "fail":
        assert await line.give_up(queue, claim, stage, "attempt") == "CANCELLED"
    else:
        await queue.tick()
        await line.silence(queue, stage, id)
        await queue.tick()

    assert await line.field(queue, id, "outcome") == "cancelled"
    assert await line.count(queue, "cancelled") == 1
    await line.pop_and_take(queue)
    assert await line.leftovers(queue) == []


async def test_cancel_of_what_is_done_or_unknown(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.through(queue)
    assert await queue.cancel([id, "never.0"]) == ["DONE", "NONE"]
    popped = await queue.pop("train", 1, "t", 60)
    assert await queue.cancel([id]) == ["DONE"]
    assert await queue.take(popped) == ["OK"]
    assert await queue.cancel([id]) == ["NONE"]
    assert await line.count(queue, "scored") == 1


async def test_every_rollout_is_counted_once(queue: Queue) -> None:
    ids = await line.put(queue, samples=6)
    await queue.cancel(ids[:1])
    claims = await queue.claim("init", 6, "w")
    await line.give_up(queue, claims[0], "init", "fatal")
    for claim in claims[1:3]:
        await line.pass_on(queue, claim, "init")
    for stage in ("run", "eval"):
        for claim in await queue.claim(stage, 2, "w"):
            await line.pass_on(queue, claim, stage)
    await line.pop_and_take(queue, 3)

    names = ("enqueued", "live", "acked", "scored", "failed", "cancelled")
    assert [await line.count(queue, name) for name in names] == [6, 3, 3, 2, 1, 1]
