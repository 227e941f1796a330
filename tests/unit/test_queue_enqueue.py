"""The queue's verbs: enqueue and claim. Order, lanes, refusals, and each sent twice."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.errors import QueueFull
from pipeline.queue import Queue
from tests import line


async def test_a_group_is_in_with_all_its_samples(queue: Queue) -> None:
    ids = await line.put(queue, samples=4)

    claims = await queue.claim("init", 10, "w")

    assert sorted(claim.id for claim in claims) == ids
    assert all(claim.attempt == 1 and claim.losses == 0 and not claim.alone for claim in claims)
    assert await line.count(queue, "live") == await line.count(queue, "enqueued") == 4


async def test_the_same_group_again_changes_nothing(queue: Queue) -> None:
    await line.put(queue, samples=3)
    await line.put(queue, samples=3)

    assert await line.count(queue, "enqueued") == 3
    assert len(await queue.claim("init", 10, "w")) == 3


async def test_only_what_is_unknown_is_added(queue: Queue) -> None:
    await line.put(queue, samples=2)
    await line.through(queue, 2)
    await line.pop_and_take(queue, 1)

    await line.put(queue, samples=2)

    assert await line.count(queue, "enqueued") == 2, "one is done and one was acked: neither is enqueued again"


async def test_a_full_line_refuses_the_whole_group(queue: Queue) -> None:
    small = Queue(queue.redis, queue.config.changed({"line.max_length": 5}))
    await line.put(small, "a", 3)
    before = await queue.execute("DBSIZE")

    with pytest.raises(QueueFull, match=r"holds 3 rollouts.*max_length = 5.*task b with 3 samples"):
        await line.put(small, "b", 3)

    assert await queue.execute("DBSIZE") == before
    await line.put(small, "c", 2)
    assert await line.count(queue, "live") == 5


async def test_what_is_acked_makes_room(queue: Queue) -> None:
    small = Queue(queue.redis, queue.config.changed({"line.max_length": 1}))
    await line.put(small, "a")
    await line.through(small)
    with pytest.raises(QueueFull):
        await line.put(small, "b")
    await line.pop_and_take(small)

    await line.put(small, "b")

    assert await line.count(queue, "live") == 1


async def test_no_bound_at_max_length_0(queue: Queue) -> None:
    boundless = Queue(queue.redis, queue.config.changed({"line.max_length": 0}))
    await line.put(boundless, samples=3)
    assert await line.count(queue, "live") == 3


async def test_older_groups_first_moved_by_priority(queue: Queue) -> None:
    await line.put(queue, "old")
    await line.put(queue, "new")
    await line.put(queue, "urgent", priority=1)
    await line.put(queue, "idle", priority=-1)

    claims = await queue.claim("init", 10, "w")

    assert [claim.id for claim in claims] == ["urgent.0", "old.0", "new.0", "idle.0"]


async def test_the_group_s_age_decides_in_every_stage(queue: Queue) -> None:
    await line.put(queue, "old")
    await line.put(queue, "new")
    old, new = await queue.claim("init", 2, "w")
    await line.pass_on(queue, new, "init")
    await line.pass_on(queue, old, "init")

    assert [claim.id for claim in await queue.claim("run", 2, "w")] == ["old.0", "new.0"]


async def test_a_retry_keeps_its_place(queue: Queue) -> None:
    await line.put(queue, "old")
    await line.put(queue, "new")
    claim = await line.one(queue)
    assert await line.give_up(queue, claim, "init", "attempt") == "READY"

    assert (await line.one(queue)).id == "old.0"


@pytest.mark.parametrize("batch", [1, 7])
async def test_lanes_share_by_weight(queue: Queue, batch: int) -> None:
    for number in range(60):
        await line.put(queue, f"t{number}")
        await line.put(queue, f"e{number}", lane="eval")

    served = Counter[str]()
    while sum(served.values()) < 50:
        for claim in await queue.claim("init", min(batch, 50 - sum(served.values())), "w"):
            served["train" if claim.id.startswith("t") else "eval"] += 1

    assert served == {"train": 40, "eval": 10}, "weights 4 and 1"


async def test_a_lone_lane_gets_everything(queue: Queue) -> None:
    await line.put(queue, samples=9, lane="eval")
    assert len(await queue.claim("init", 9, "w")) == 9
    assert await queue.claim("init", 9, "w") == []


async def test_an_idle_lane_saves_no_credit(queue: Queue) -> None:
    await line.put(queue, "t", 40)
    await queue.claim("init", 30, "w")
    await line.put(queue, "e", 10, lane="eval")

    claims = await queue.claim("init", 10, "w")

    assert Counter(claim.id[0] for claim in claims) == {"t": 8, "e": 2}


async def test_the_same_claim_sent_again_gets_the_same_leases(queue: Queue) -> None:
    await line.put(queue, samples=5)

    first = await queue.claim("init", 2, "w", "nonce")
    again = await queue.claim("init", 2, "w", "nonce")

    assert first == again
    assert len(await queue.claim("init", 9, "w")) == 3


async def test_a_claim_that_arrives_after_the_next_one_gets_nothing(queue: Queue) -> None:
    """Its worker gave that connection up: such a lease would run out in nobody's hands, and cost an attempt."""
    await line.put(queue, samples=3)
    early, late = queue.nonce(), queue.nonce()
    assert await queue.claim("init", 0, "w", early) == []  # the repetition was answered
    (mine,) = await queue.claim("init", 1, "w", late)

    assert await queue.claim("init", 2, "w", early) == []
    assert await queue.claim("init", 1, "w", late) == [mine], "it sends its last one again"
    other = Queue(queue.redis, queue.config)
    assert len(await queue.claim("init", 1, "w", other.nonce())) == 1, "a new process of the same name"
    assert await queue.execute("ZCARD", queue.key("lease", "init")) == 2


async def test_a_claim_sent_again_omits_what_is_no_longer_held(queue: Queue) -> None:
    await line.put(queue, samples=2)
    first, second = await queue.claim("init", 2, "w", "nonce")
    await line.pass_on(queue, first, "init")

    assert await queue.claim("init", 2, "w", "nonce") == [second]


async def test_small_task_and_payload_come_with_the_claim(queue: Queue) -> None:
    await line.put(queue)
    claim = await line.one(queue)
    await line.pass_on(queue, claim, "init", payload=b"small")

    claim = await line.one(queue, "run")

    assert claim.payload == b"small"
    assert claim.task == await queue.read_task("g")


async def test_large_payload_stays_where_it_is(queue: Queue) -> None:
    await line.put(queue)
    claim = await line.one(queue)
    await queue.write_payload(claim.id, claim.token, b"x" * 5000, 60)
    await line.pass_on(queue, claim, "init", written=True)

    after = await line.one(queue, "run")

    assert (after.payload, after.payload_token) == (b"", claim.token)
    assert await queue.read_payload(after.id, after.payload_token) == b"x" * 5000
