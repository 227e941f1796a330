"""The queue's verbs: commit and fail. The fence, the spent token, payloads, attempts and losses."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipeline.inspect import attempts_of
from pipeline.leases import Failure
from pipeline.queue import Queue
from tests import line


async def test_a_commit_leads_to_the_next_stage_and_at_last_to_done(queue: Queue) -> None:
    (id,) = await line.put(queue)
    for stage, after in (("init", "run"), ("run", "eval"), ("eval", "done")):
        claim = await line.one(queue, stage)
        assert await line.pass_on(queue, claim, stage, worked=1.5) == "OK"
        assert await line.state(queue, id) == (after, "ready")

    assert await line.field(queue, id, "outcome") == "scored"
    assert await line.field(queue, id, "worked") == "4500"
    assert await line.count(queue, "scored") == 1
    assert [await line.count(queue, f"committed:{stage}") for stage in ("init", "run", "eval")] == [1, 1, 1]


async def test_the_same_commit_sent_again_is_told_so(queue: Queue) -> None:
    await line.put(queue)
    for stage in ("init", "run", "eval"):
        claim = await line.one(queue, stage)
        assert [await line.pass_on(queue, claim, stage) for _ in range(3)] == ["OK", "AGAIN", "AGAIN"]
    assert await line.count(queue, "scored") == 1
    assert len(await queue.pop("train", 5, "t", 60)) == 1


async def test_only_the_last_lease_commits(queue: Queue) -> None:
    await line.put(queue)
    stale = await line.one(queue, worker="stalled")
    await queue.tick()
    await line.silence(queue, "init", stale.id)
    await queue.tick()
    fresh = await line.one(queue, worker="next")

    assert await line.pass_on(queue, stale, "init", payload=b"stale") == "STALE"
    assert await line.give_up(queue, stale, "init", "fatal") == "STALE"
    assert await line.pass_on(queue, fresh, "init", payload=b"fresh") == "OK"
    assert await line.pass_on(queue, stale, "init", payload=b"stale") == "STALE"
    assert (await line.one(queue, "run")).payload == b"fresh"


async def test_of_a_hundred_commits_at_once_one_is_accepted(queue: Queue) -> None:
    await line.put(queue)
    claim = await line.one(queue)

    replies = await asyncio.gather(*(line.pass_on(queue, claim, "init") for _ in range(100)))

    assert sorted(set(replies)) == ["AGAIN", "OK"]
    assert replies.count("OK") == 1


async def test_a_payload_that_is_not_there_is_asked_for(queue: Queue) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)

    assert await line.pass_on(queue, claim, "init", written=True) == "NOPAYLOAD"
    assert await line.state(queue, id) == ("init", "leased")
    await queue.write_payload(id, claim.token, b"late", 60)
    assert await line.pass_on(queue, claim, "init", written=True) == "OK"


async def test_payload_lives_as_long_as_it_is_needed(queue: Queue) -> None:
    (id,) = await line.put(queue)
    first = await line.one(queue)
    await queue.write_payload(id, first.token, b"one", 60)
    assert 0 < await queue.execute("TTL", queue.key("p", id, first.token)) <= 60, "expires while nothing is committed"
    await line.pass_on(queue, first, "init", written=True)
    assert await queue.execute("TTL", queue.key("p", id, first.token)) == -1, "stays once it is committed"

    second = await line.one(queue, "run")
    await line.pass_on(queue, second, "run", payload=b"two")
    assert await queue.read_payload(id, first.token) is None, "what is replaced goes"
    third = await line.one(queue, "eval")
    await line.pass_on(queue, third, "eval")
    assert await queue.read_payload(id, second.token) == b"two", "a commit without one keeps the one there"

    await line.pop_and_take(queue)
    assert await line.leftovers(queue) == []


async def test_the_beat_renews_a_payload_that_is_not_committed_yet(queue: Queue) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)
    await queue.write_payload(id, claim.token, b"one", 5)

    await queue.beat("w", {}, [("init", id, claim.token)])

    assert await queue.execute("TTL", queue.key("p", id, claim.token)) > 60


async def test_the_payload_of_a_stale_attempt_expires_by_itself(queue: Queue) -> None:
    (id,) = await line.put(queue)
    stale = await line.one(queue)
    await queue.write_payload(id, stale.token, b"stale", 60)
    await queue.tick()
    await line.silence(queue, "init", id)
    await queue.tick()
    await line.through(queue)
    await line.pop_and_take(queue)

    assert 0 < await queue.execute("TTL", queue.key("p", id, stale.token)) <= 60
    assert await line.leftovers(queue) == []


async def test_attempts_are_bounded_and_counted_by_stage(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.pass_on(queue, await line.one(queue), "init")
    replies = []
    for attempt in (1, 2, 3):
        claim = await line.one(queue, "run")
        assert claim.attempt == attempt
        replies.append(await line.give_up(queue, claim, "run", "attempt", log="x" * 9000, host="h1", exit_code="-9"))

    assert replies == ["READY", "READY", "FAILED"]
    assert await line.state(queue, id) == ("done", "ready")
    fields = [await line.field(queue, id, name) for name in ("outcome", "kind", "why", "at", "host", "exit")]
    assert fields == ["failed", "sandbox", "it broke", "run", "h1", "-9"]
    assert len(await line.field(queue, id, "log")) == 4096
    assert [await line.count(queue, name) for name in ("failed", "attempt:run")] == [1, 3]


async def test_a_commit_sets_the_attempts_back(queue: Queue) -> None:
    await line.put(queue)
    for stage in ("init", "run"):
        for _ in range(2):
            await line.give_up(queue, await line.one(queue, stage), stage, "attempt")
        assert await line.pass_on(queue, await line.one(queue, stage), stage) == "OK"
    assert (await line.one(queue, "eval")).attempt == 1


async def test_losses_are_bounded_on_their_own(queue: Queue) -> None:
    (id,) = await line.put(queue)
    replies = []
    for loss in range(10):
        claim = await line.one(queue)
        assert (claim.attempt, claim.losses) == (1, loss)
        replies.append(await line.give_up(queue, claim, "init", "loss", kind="worker"))

    assert replies == ["READY"] * 9 + ["FAILED"]
    assert await line.field(queue, id, "kind") == "worker"


async def test_given_back_counts_nothing(queue: Queue) -> None:
    await line.put(queue)
    for _ in range(20):
        claim = await line.one(queue)
        assert (claim.attempt, claim.losses) == (1, 0)
        assert await line.give_up(queue, claim, "init", "back") == "READY"


async def test_fatal_ends_it_at_once_as_a_record(queue: Queue) -> None:
    await line.put(queue, samples=2)
    claim = await line.one(queue)
    assert await line.give_up(queue, claim, "init", "fatal", kind="task") == "FAILED"

    (popped,) = await queue.pop("train", 2, "t", 60)
    assert popped.id == claim.id


@pytest.mark.parametrize("mode", ["attempt", "loss", "fatal", "back"])
async def test_the_same_failure_sent_again_counts_once(queue: Queue, mode: str) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)
    first = await line.give_up(queue, claim, "init", mode)

    assert await line.give_up(queue, claim, "init", mode) == "AGAIN"
    assert first == ("FAILED" if mode == "fatal" else "READY")
    assert await line.count(queue, f"{mode}:init") == 1
    if mode != "fatal":
        assert (await line.one(queue)).attempt == (2 if mode == "attempt" else 1)
    assert await line.field(queue, id, "losses") == ("1" if mode == "loss" else "0")


async def test_a_delayed_retry_waits_for_its_time(queue: Queue) -> None:
    (id,) = await line.put(queue)
    assert await line.give_up(queue, await line.one(queue), "init", "attempt", delay=30.0) == "DELAYED"
    assert (await queue.tick()).promoted == 0
    assert await queue.claim("init", 1, "w") == []
    assert await line.state(queue, id) == ("init", "delayed")

    await queue.execute("ZADD", queue.key("delayed", "init"), 1, id)
    assert (await queue.tick()).promoted == 1
    assert (await line.one(queue)).attempt == 2


async def test_a_failed_run_with_a_sandbox_starts_again_at_init(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.pass_on(queue, await line.one(queue), "init", restart="init", sandbox="box")
    assert await line.field(queue, id, "sandbox") == "box"
    await line.give_up(queue, await line.one(queue, "run"), "run", "attempt")

    assert await line.state(queue, id) == ("init", "ready")
    assert (await line.one(queue)).attempt == 1


async def test_a_failed_run_without_one_is_run_again(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.pass_on(queue, await line.one(queue), "init", restart="run", sandbox="")
    await line.give_up(queue, await line.one(queue, "run"), "run", "attempt")
    assert await line.state(queue, id) == ("run", "ready")


async def test_a_sandbox_that_is_gone_sends_it_back_to_init(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.pass_on(queue, await line.one(queue), "init", restart="run", sandbox="box")
    assert await line.give_up(queue, await line.one(queue, "run"), "run", "loss", to="init") == "READY"
    assert await line.state(queue, id) == ("init", "ready")


async def test_attempts_of_run_are_bounded_also_when_each_goes_by_way_of_init(queue: Queue) -> None:
    (id,) = await line.put(queue)
    for _ in range(3):
        await line.pass_on(queue, await line.one(queue), "init", restart="init")
        await line.give_up(queue, await line.one(queue, "run"), "run", "attempt")
    assert await line.state(queue, id) == ("done", "ready")
    assert await line.field(queue, id, "outcome") == "failed"


async def test_each_attempt_is_on_record(queue: Queue) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)
    failure = Failure(mode="attempt", kind="sandbox", why="it broke")
    await queue.fail("init", id, claim.token, failure, record=json.dumps({"stage": "init", "outcome": "failed"}))
    await line.pass_on(queue, await line.one(queue), "init", record=json.dumps({"stage": "init", "outcome": "ok"}))

    assert [record["outcome"] for record in await attempts_of(queue, id)] == ["failed", "ok"]


async def test_a_dead_letter_is_a_copy_that_outlives_the_rollout_for_a_while(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.give_up(queue, await line.one(queue), "init", "fatal", log="the end of its log")
    await line.pop_and_take(queue)

    letter = await queue.execute("HGETALL", queue.key("letter", id))
    fields = letter if isinstance(letter, dict) else dict(zip(letter[::2], letter[1::2], strict=True))
    assert (fields[b"kind"], fields[b"log"]) == (b"sandbox", b"the end of its log")
    assert await queue.execute("ZRANGE", queue.key("dead", "init"), 0, -1) == [id.encode()]
    week = 7 * 86400
    assert week - 60 < await queue.execute("TTL", queue.key("letter", id)) <= week
    assert week - 60 < await queue.execute("TTL", queue.key("t", "g")) <= week, "the task that a requeue needs"
    assert await line.leftovers(queue) == []


async def test_old_dead_letters_leave_the_list(queue: Queue) -> None:
    (id,) = await line.put(queue)
    await line.give_up(queue, await line.one(queue), "init", "fatal")
    await queue.execute("ZADD", queue.key("dead", "init"), 1, id)
    await queue.tick()
    assert await queue.execute("ZCARD", queue.key("dead", "init")) == 0
