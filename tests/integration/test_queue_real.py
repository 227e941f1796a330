"""The same verbs on a real server: tests/unit/test_queue_*.py, test_schema.py, and what only a real server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pipeline import trouble
from pipeline.errors import MemoryHigh
from pipeline.queue import Queue
from tests import line
from tests.services import RedisService
from tests.unit.test_queue_close import *  # noqa: F403
from tests.unit.test_queue_commit import *  # noqa: F403
from tests.unit.test_queue_enqueue import *  # noqa: F403
from tests.unit.test_queue_pop import *  # noqa: F403
from tests.unit.test_queue_tick import *  # noqa: F403
from tests.unit.test_schema import *  # noqa: F403


@pytest.fixture
async def queue(redis_service: RedisService) -> AsyncIterator[Queue]:
    """The verbs on a real server, with the default settings (leases of 30 s: no test waits for one)."""
    defaults = redis_service.config.changed({"lease.seconds": 30.0, "lease.beat": 10.0, "lease.tick": 1.0})
    async with redis_service.client() as client:
        yield Queue(client, defaults)


@pytest.fixture
async def full(queue: Queue) -> AsyncIterator[Queue]:
    """A line with three rollouts in each stage's hands, on a server that has just become full."""
    for group in ("a", "b", "c"):
        await line.put(queue, group)
    await queue.tick()
    yield queue
    await fill(queue, False)


async def fill(queue: Queue, full: bool) -> None:
    """Full: every command that may take memory is refused. Else: as much room as a server of ours has at its start."""
    await queue.execute("CONFIG", "SET", "maxmemory", 1 if full else 1 << 32)


async def test_a_full_server_refuses_an_enqueue_with_nothing_written(full: Queue) -> None:
    before = (
        await full.execute("DBSIZE"),
        await line.count(full, "enqueued"),
        await full.execute("GET", full.key("seq")),
    )
    await fill(full, True)

    with pytest.raises(MemoryHigh, match="Redis is full .*task d was not enqueued"):
        await line.put(full, "d", 4)

    after = await full.execute("DBSIZE"), await line.count(full, "enqueued"), await full.execute("GET", full.key("seq"))
    assert before == after


async def test_a_full_server_refuses_more_samples_of_a_known_group_too(full: Queue) -> None:
    await fill(full, True)
    with pytest.raises(MemoryHigh):
        await line.put(full, "a", 4)
    assert await line.count(full, "enqueued") == 3


async def test_a_full_server_lets_the_line_empty_itself(full: Queue) -> None:
    await fill(full, True)
    for stage in ("init", "run", "eval"):
        claims = await full.claim(stage, 3, "w")
        assert len(claims) == (2 if stage == "eval" else 3)
        held = [(stage, claim.id, claim.token) for claim in claims]
        assert await full.beat("w", {"stage": stage}, held) == [1] * len(claims)
        if stage == "run":
            assert await line.give_up(full, claims.pop(), stage, "attempt", delay=1.0) == "DELAYED"
            assert await full.cancel(["c.0"]) == ["REMOVED"]
        for claim in claims:
            assert await line.pass_on(full, claim, stage, payload=b"data") == "OK"
        await full.tick()
    assert len(await line.pop_and_take(full, 3)) == 3
    assert await line.leftovers(full) == []


async def test_a_refused_payload_is_written_when_there_is_room(full: Queue) -> None:
    claim = await line.one(full)
    await fill(full, True)
    patient = Queue(full.redis, full.config, patience=30.0)
    writing = asyncio.create_task(patient.write_payload(claim.id, claim.token, b"x" * 9000, 60))
    await asyncio.sleep(0.2)
    assert not writing.done()
    await fill(full, False)
    await writing

    assert await line.pass_on(full, claim, "init", written=True) == "OK"


async def test_a_server_that_forgot_the_scripts_is_taught_again(queue: Queue) -> None:
    await line.put(queue)
    await queue.execute("SCRIPT", "FLUSH")
    claim = await line.one(queue)
    await queue.execute("SCRIPT", "FLUSH")
    assert await line.pass_on(queue, claim, "init") == "OK"


async def test_above_the_memory_mark(queue: Queue) -> None:
    assert not await queue.memory_high()
    used, _ = await queue.memory()
    await queue.execute("CONFIG", "SET", "maxmemory", int(used * 1.2))
    try:
        assert await Queue(queue.redis, queue.config).memory_high(), "a look holds for a moment: this one is fresh"
    finally:
        await fill(queue, False)


async def test_an_idle_lane_is_told_by_what_lies_there(queue: Queue) -> None:
    assert list(await trouble.troubles(queue, "train")) == ["nothing"]
    await line.put(queue)
    await line.through(queue)
    assert list(await trouble.troubles(queue, "train")) == ["unpopped"], "a batch that lies ready is not nothing"
    await queue.pop("train", 1, "another", 60)
    assert list(await trouble.troubles(queue, "train", "another")) == ["nothing"]
    assert "in the hands of another" in (await trouble.troubles(queue, "train", "me"))["elsewhere"]
