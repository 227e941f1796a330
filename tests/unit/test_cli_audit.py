"""The audit finds every way in which a line can be broken, and nothing in a sound one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pipeline import letters
from pipeline.audit import audit
from pipeline.errors import TaskError
from pipeline.inspect import fields_of
from pipeline.queue import Queue
from tests.line import give_up, one, pass_on, put, through

Break = Callable[[Queue, Any], Awaitable[Any]]


async def busy(queue: Queue) -> Any:
    """A line with something in every state; returns the claim that is in work in INIT."""
    await put(queue, "a", 4)
    await put(queue, "b", 2)
    await through(queue, 2)
    claims = await queue.claim("init", 3, "w")
    await queue.write_payload(claims[0].id, claims[0].token, b"half", 60)
    assert await pass_on(queue, claims[1], "init", payload=b"small") == "OK"
    assert await give_up(queue, claims[2], "init", "attempt", delay=60.0) == "DELAYED"
    return claims[0]


async def test_a_busy_line_is_sound(queue: Queue) -> None:
    await busy(queue)
    assert await audit(queue) == []


async def test_an_empty_line_is_sound_and_stays_so_after_an_ack(queue: Queue) -> None:
    assert await audit(queue) == []
    await put(queue, "a", 2)
    await through(queue, 2)
    await queue.take(await queue.pop("train", 2, "c", 60))
    assert await audit(queue) == []


BREAKS: dict[str, tuple[Break, str]] = {
    "lost": (lambda q, c: q.redis.zrem(q.key("lease", "init"), c.id), "stands in no set"),
    "twice": (lambda q, c: q.redis.zadd(q.key("ready", "eval", "eval"), {c.id: 1}), "lease:init, ready:eval:eval"),
    "ghost": (lambda q, c: q.redis.zadd(q.key("ready", "run", "train"), {"ghost": 1}), "ghost stands in ready:run"),
    "no hash": (lambda q, c: q.redis.delete(q.key("r", c.id)), "has no hash"),
    "no token": (lambda q, c: q.redis.hset(q.key("r", c.id), "token", ""), "leased without a token"),
    "not owned": (lambda q, c: q.redis.srem(q.key("own", "w"), c.id), "whose own set lacks it"),
    "owned twice": (lambda q, c: q.redis.sadd(q.key("own", "v"), c.id), "worker v is said to own"),
    "payload without owner": (lambda q, c: q.redis.persist(q.key("p", c.id, c.token)), "neither an expiry nor an own"),
    "payload gone": (lambda q, c: q.redis.hset(q.key("r", c.id), "payload", "x"), "names a payload that is not there"),
    "payload dying": (lambda q, c: q.redis.hset(q.key("r", c.id), "payload", c.token), "will expire"),
    "no member": (lambda q, c: q.redis.srem(q.key("m", "a"), c.id), "is no member of its group"),
    "no group": (lambda q, c: q.redis.delete(q.key("g", "b")), "belongs to group b, which has no hash"),
    "no task": (lambda q, c: q.redis.delete(q.key("t", "b")), "group b has no task"),
    "task left": (lambda q, c: q.redis.set(q.key("t", "old"), b"x"), "task t:old has neither an expiry nor a group"),
    "half group": (lambda q, c: q.redis.zadd(q.key("groups", "train"), {"a": 1}), "stands as complete with 2 of 4"),
    "live": (lambda q, c: q.redis.hincrby(q.key("counts"), "live", 1), "were enqueued"),
    "counted away": (lambda q, c: q.redis.hset(q.key("counts"), mapping={"live": 5, "acked": 1}), "counted as live"),
    "lane": (lambda q, c: q.redis.zadd(q.key("ready", "init", "old"), {"x.0": 1}), "line.lanes does not name it"),
    "strange key": (lambda q, c: q.redis.set(q.key("strange"), 1), "of no kind"),
    "no end": (lambda q, c: q.redis.set(q.key("gone", "x.0"), 1), "has no end"),
    "started but gone": (lambda q, c: q.redis.sadd(q.key("started", "train"), "x.0"), "counts as started in lane tr"),
    "started elsewhere": (lambda q, c: q.redis.sadd(q.key("started", "eval"), c.id), "is of lane train and counts as"),
    "begun in part": (lambda q, c: q.redis.hset(q.key("g", "b"), "begun", 1), "which has begun, and does not count"),
    "backend without hash": (lambda q, c: q.redis.zadd(q.key("backends"), {"n:1": 1e15}), "n:1 is listed but has no"),
    "backend not listed": (lambda q, c: q.redis.hset(q.key("backend", "n:1"), "url", "x"), "has a hash but is not"),
    "raised for ever": (lambda q, c: q.redis.set(q.key("raise", "n:1"), "w"), "key raise:n:1 should expire"),
    "attempts left": (lambda q, c: q.redis.rpush(q.key("a", "x.0"), "{}"), "list of attempts but no hash"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
async def test_each_break_is_found(queue: Queue, name: str) -> None:
    break_it, says = BREAKS[name]
    claim = await busy(queue)
    await break_it(queue, claim)
    assert any(says in finding for finding in await audit(queue)), await audit(queue)


async def test_a_dead_letter_becomes_a_new_rollout_once(queue: Queue) -> None:
    await put(queue, "a", 2)
    claim = await one(queue)
    assert await give_up(queue, claim, "init", "fatal") == "FAILED"
    (letter,) = await letters.letters(queue)
    assert (letter.id, letter.stage, letter.kind, letter.requeued) == ("a.0", "init", "sandbox", "")
    new = await letters.requeue(queue, "a.0")
    assert new.startswith("a-retry-") and new.endswith(".0")
    assert (await letters.letters(queue))[0].requeued == new
    with pytest.raises(TaskError, match=f"requeued already, as {new}"):
        await letters.requeue(queue, "a.0")
    assert await letters.requeue(queue, "a.0", again=True) != new
    assert await audit(queue) == []


async def test_a_requeue_that_was_cut_off_is_taken_up_again(queue: Queue) -> None:
    await put(queue, "a")
    assert await give_up(queue, await one(queue), "init", "fatal") == "FAILED"
    await queue.redis.hset(queue.key("letter", "a.0"), "requeued", "a-retry-123456.0")
    assert await letters.requeue(queue, "a.0") == "a-retry-123456.0"
    assert await fields_of(queue, "a-retry-123456.0")


async def test_a_requeue_after_the_ack_finds_the_task(queue: Queue) -> None:
    await put(queue, "a")
    assert await give_up(queue, await one(queue), "init", "fatal") == "FAILED"
    await queue.take(await queue.pop("train", 1, "c", 60))
    new = await letters.requeue(queue, "a.0")
    claim = await one(queue)
    assert claim.id == new and claim.task
    assert await audit(queue) == []


async def test_a_requeue_without_its_task_says_so(queue: Queue) -> None:
    await put(queue, "a")
    await give_up(queue, await one(queue), "init", "fatal")
    await queue.redis.delete(queue.key("t", "a"))
    with pytest.raises(TaskError, match="not kept any more"):
        await letters.requeue(queue, "a.0")
    with pytest.raises(TaskError, match="there is no dead letter b"):
        await letters.requeue(queue, "b.0")
