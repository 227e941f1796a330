"""The queue's verbs: beat and tick. Leases that run out, blindness, company at death, deadlines and waits.

No test waits: a lease runs out, and a moment passes, by a change of the score or the key that holds it.
"""

from __future__ import annotations

import time

import pytest

from pipeline.inspect import attempts_of, workers
from pipeline.leases import read_tick
from pipeline.queue import Queue
from tests import line


async def lost(queue: Queue, stage: str, *ids: str) -> None:
    """These leases run out while somebody ticks."""
    await queue.tick()
    await line.silence(queue, stage, *ids)
    assert (await queue.tick()).expired == len(ids)


async def last_tick(queue: Queue, seconds_ago: float) -> None:
    await queue.execute("SET", queue.key("tick"), int((time.time() - seconds_ago) * 1000))


async def test_a_beat_keeps_a_lease(queue: Queue) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)
    await queue.tick()
    await line.silence(queue, "init", id)

    assert await queue.beat("w", {}, [("init", id, claim.token)]) == [1]
    assert (await queue.tick()).expired == 0


async def test_a_beat_says_what_is_lost_and_what_is_cancelled(queue: Queue) -> None:
    ids = await line.put(queue, samples=3)
    claims = {claim.id: claim for claim in await queue.claim("init", 3, "w")}
    await lost(queue, "init", ids[0])
    await queue.cancel([ids[1]], "no longer wanted")
    held = [("init", id, claims[id].token) for id in ids]

    assert await queue.beat("w", {}, held) == [0, "no longer wanted", 1]
    assert await queue.beat("w", {}, held) == [0, "no longer wanted", 1], "sent twice"


async def test_a_beat_says_what_the_worker_is(queue: Queue) -> None:
    await queue.beat("w", {"stage": "run", "slots": 4}, [])
    (worker,) = await workers(queue)
    assert (worker["worker"], worker["stage"], worker["slots"]) == ("w", "run", 4)


async def test_workers_silent_for_an_hour_drop_off(queue: Queue) -> None:
    await queue.beat("w", {"stage": "run"}, [])
    await queue.execute("ZADD", queue.key("beats"), int((time.time() - 3700) * 1000), "w")
    await queue.tick()
    assert await queue.execute("EXISTS", queue.key("beats"), queue.key("workers")) == 0


async def test_a_silent_worker_s_rollout_is_given_out_again_at_its_old_place(queue: Queue) -> None:
    await line.put(queue, "old")
    await line.put(queue, "new")
    (old,) = await queue.claim("init", 1, "w1")
    await lost(queue, "init", old.id)

    again = await line.one(queue, worker="w2")

    assert (again.id, again.attempt, again.losses) == ("old.0", 2, 0)
    assert again.token != old.token
    (record,) = await attempts_of(queue, "old.0")
    assert (record["worker"], record["outcome"], record["kind"]) == ("w1", "lost", "worker")


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_three_deaths_alone_end_it_with_the_cause(queue: Queue, stage: str) -> None:
    (id,) = await line.put(queue)
    for before in ("init", "run", "eval"):
        if before == stage:
            break
        await line.pass_on(queue, await line.one(queue, before), before)
    for number in range(3):
        await line.one(queue, stage, worker=f"w{number}")
        await lost(queue, stage, id)

    assert await line.state(queue, id) == ("done", "ready")
    assert (await line.field(queue, id, "outcome"), await line.field(queue, id, "kind")) == ("failed", "worker")
    assert "ran this rollout alone (attempt 3 of 3)" in await line.field(queue, id, "why")


async def test_a_death_in_company_is_a_loss_and_after_two_each_runs_alone(queue: Queue) -> None:
    ids = await line.put(queue, samples=4)
    for number in range(2):
        claims = await queue.claim("init", 4, f"w{number}")
        assert [claim.alone for claim in claims] == [False] * 4
        await lost(queue, "init", *ids)

    claims = await queue.claim("init", 4, "w2")

    assert [(claim.attempt, claim.losses, claim.alone) for claim in claims] == [(1, 2, True)] * 4


async def test_company_counts_though_its_leases_run_out_one_by_one(queue: Queue) -> None:
    ids = await line.put(queue, samples=3)
    await queue.claim("init", 3, "w")
    for id in ids:
        await lost(queue, "init", id)

    claims = await queue.claim("init", 3, "w2")
    assert [(claim.attempt, claim.losses) for claim in claims] == [(1, 1)] * 3


async def test_a_worker_that_is_heard_of_again_is_not_held_dead(queue: Queue) -> None:
    ids = await line.put(queue, samples=2)
    claims = {claim.id: claim for claim in await queue.claim("init", 2, "w")}
    await lost(queue, "init", ids[0])
    await queue.beat("w", {}, [("init", ids[1], claims[ids[1]].token)])
    await lost(queue, "init", ids[1])

    assert [await line.field(queue, id, "losses") for id in ids] == ["1", "0"], "the second was alone by then"


async def test_losses_in_company_are_bounded(queue: Queue) -> None:
    ids = await line.put(queue, samples=2)
    for number in range(10):
        await queue.claim("init", 2, f"w{number}")
        await lost(queue, "init", *ids)
    for id in ids:
        assert (await line.field(queue, id, "outcome"), await line.field(queue, id, "kind")) == ("failed", "worker")
        assert "loss 10 of 10" in await line.field(queue, id, "why")


async def test_a_lost_run_with_a_sandbox_goes_back_to_init(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.pass_on(queue, await line.one(queue), "init", restart="init")
    await line.one(queue, "run")
    await lost(queue, "run", id)
    assert await line.state(queue, id) == ("init", "ready")


async def test_after_it_was_blind_no_lease_runs_out_for_one_lease(queue: Queue) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)
    await last_tick(queue, queue.config.lease.seconds / 2 + 1)
    await line.silence(queue, "init", id)

    ticked = await queue.tick()
    assert (ticked.blind, ticked.expired) == (True, 0)
    until = int(await queue.execute("GET", queue.key("blind"))) / 1000
    assert time.time() + queue.config.lease.seconds - 1 < until <= time.time() + queue.config.lease.seconds + 1
    assert (await queue.tick()).blind, "the next tick, a second later, still waits"
    assert await queue.beat("w", {}, [("init", id, claim.token)]) == [1], "the living owner beats first"


async def test_blindness_ends(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.one(queue)
    await last_tick(queue, 60)
    await line.silence(queue, "init", id)
    await queue.tick()

    await queue.execute("SET", queue.key("blind"), 1)
    ticked = await queue.tick()

    assert (ticked.blind, ticked.expired) == (False, 1)


async def test_the_blind_still_promote_what_is_due(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.give_up(queue, await line.one(queue), "init", "attempt", delay=5.0)
    await queue.execute("ZADD", queue.key("delayed", "init"), 1, id)
    await last_tick(queue, 60)

    ticked = await queue.tick()

    assert (ticked.blind, ticked.promoted) == (True, 1)


async def test_a_tick_sent_again_does_nothing_more(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.one(queue)
    await lost(queue, "init", id)
    assert (await queue.tick()).expired == 0
    assert len(await attempts_of(queue, id)) == 1


async def overdue(queue: Queue, id: str) -> None:
    """The moment in `due`, and the deadline itself, are over."""
    await queue.execute("ZADD", queue.key("due"), "XX", 1, id)
    if await line.field(queue, id, "deadline"):
        await queue.execute("HSET", queue.key("r", id), "deadline", 1)


async def test_a_deadline_ends_what_waits(queue: Queue) -> None:
    (id,) = await line.put(queue, deadline=time.time() + 3600)
    assert (await queue.tick()).over == 0
    await overdue(queue, id)

    assert (await queue.tick()).over == 1
    assert [await line.field(queue, id, name) for name in ("outcome", "kind")] == ["failed", "limit"]
    assert "deadline passed while it waited in init" in await line.field(queue, id, "why")
    assert await queue.claim("init", 1, "w") == []


async def test_a_deadline_ends_what_waits_for_a_retry(queue: Queue) -> None:
    (id,) = await line.put(queue, deadline=time.time() + 3600)
    await line.give_up(queue, await line.one(queue), "init", "attempt", delay=60.0)
    await overdue(queue, id)
    assert (await queue.tick()).over == 1
    assert await queue.execute("EXISTS", queue.key("delayed", "init")) == 0


async def test_a_deadline_asks_the_worker_that_holds_it_to_stop(queue: Queue) -> None:
    (id,) = await line.put(queue, deadline=time.time() + 3600)
    claim = await line.one(queue)
    await overdue(queue, id)

    assert (await queue.tick()).over == 0
    assert await queue.execute("LLEN", queue.key("bell", "worker", "w")) == 1
    assert 0 < await queue.execute("TTL", queue.key("bell", "worker", "w")) <= 3600
    assert await queue.beat("w", {}, [("init", id, claim.token)]) == ["its deadline passed"]
    assert await line.give_up(queue, claim, "init", "back") == "CANCELLED"
    assert [await line.field(queue, id, name) for name in ("outcome", "kind")] == ["failed", "limit"]


async def test_a_deadline_counts_also_after_a_claim_came_before_it(queue: Queue) -> None:
    (id,) = await line.put(queue, deadline=time.time() + 3600, queue_ttl=60)
    claim = await line.one(queue)
    await queue.execute("ZADD", queue.key("due"), 1, id)  # the end of its wait, which no longer counts
    assert (await queue.tick()).over == 0
    await line.pass_on(queue, claim, "init")
    await overdue(queue, id)
    assert (await queue.tick()).over == 1


async def test_a_wait_that_is_too_long_ends_it(queue: Queue) -> None:
    (id,) = await line.put(queue, queue_ttl=60)
    await queue.execute("HSET", queue.key("r", id), "since", int((time.time() - 61) * 1000))
    await overdue(queue, id)

    assert (await queue.tick()).over == 1
    assert "waited 61 s in init, longer than its queue_ttl" in await line.field(queue, id, "why")


async def test_waiting_is_counted_anew_in_each_stage(queue: Queue) -> None:
    (id,) = await line.put(queue, queue_ttl=60)
    await line.pass_on(queue, await line.one(queue), "init")
    await overdue(queue, id)

    assert (await queue.tick()).over == 0
    assert await queue.execute("ZSCORE", queue.key("due"), id) is not None, "looked at again when its time is over"


async def test_what_is_done_has_no_deadline(queue: Queue) -> None:
    (id,) = await line.put(queue, deadline=time.time() + 3600)
    await line.through(queue)
    assert await queue.execute("EXISTS", queue.key("due")) == 0
    assert await line.field(queue, id, "outcome") == "scored"


async def test_of_many_workers_ticks_a_few_look_at_everything(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.one(queue)
    await queue.tick()
    await line.silence(queue, "init", id)

    async def tick(worker: str) -> int:
        return read_tick(await queue.verb("tick", *queue.tick_arguments(worker))).expired

    await last_tick(queue, -0.05)  # the clock went back: a tick that lies ahead holds nobody up
    assert await tick("w") == 1
    await line.one(queue)
    await line.silence(queue, "init", id)
    await last_tick(queue, 0.0)
    assert await tick("w") == 0
    await last_tick(queue, 0.2)
    assert await tick("w") == 1
