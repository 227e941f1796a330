"""The line's schema: whose number counts, what it means to be too old, and who works on a line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ResponseError

from pipeline import wire
from pipeline.envelope import OLDEST_SCHEMA, SCHEMA, Envelope, Payload, Task, decode, decode_compressed
from pipeline.errors import ConfigError, TooOld
from pipeline.groups import WHOLE
from pipeline.leases import Failure
from pipeline.letters import requeue
from pipeline.line_schema import Member, members, raise_schema
from pipeline.outstanding import Outstanding
from pipeline.producer import Producer
from pipeline.queue import Queue
from tests import line

NEXT = SCHEMA + 1


@pytest.fixture
def newer(queue: Queue) -> Queue:
    """The same line, as the next version would see it."""
    other = Queue(queue.redis, queue.config)
    other.reads = other.line_schema = NEXT
    return other


async def number(queue: Queue) -> int:
    return int(await queue.execute("GET", queue.key("schema")) or 0)


async def test_a_fresh_line_takes_the_number_of_who_opens_it_first(queue: Queue) -> None:
    assert await queue.look_at_schema() is None, "who only looks leaves it alone"
    assert await number(queue) == 0
    assert [await queue.check_schema(), await queue.look_at_schema()] == [SCHEMA, SCHEMA]
    assert (await number(queue), queue.schema, queue.outdated) == (SCHEMA, SCHEMA, False)


@pytest.mark.parametrize("old", range(OLDEST_SCHEMA, SCHEMA + 1))
async def test_an_older_line_keeps_its_number_and_is_written_in_it(queue: Queue, old: int) -> None:
    """Tasks and envelopes of a trainer, and the envelope of a dead letter that is requeued."""
    await queue.execute("SET", queue.key("schema"), old)
    assert await queue.check_schema() == queue.schema == old
    trainer = Producer(queue, Outstanding(3600.0))
    (id,) = await trainer.enqueue(
        [Task(handler="echo", id="g")], samples=1, priority=0, lane="train", wait=0, groups=WHOLE
    )
    claim = await line.one(queue)
    assert wire.unpack(claim.envelope)["schema"] == old
    assert wire.expand(await queue.read_task("g") or b"")["schema"] == old
    assert await line.give_up(queue, claim, "init", "fatal") == "FAILED"
    await requeue(queue, id)
    assert wire.unpack((await line.one(queue)).envelope)["schema"] == old


async def test_messages_of_every_number_that_is_read_are_the_same(queue: Queue) -> None:
    for old in range(OLDEST_SCHEMA, SCHEMA + 1):
        queue.line_schema = old
        await line.put(queue, f"g{old}")
    for claim in await queue.claim("init", 9, "w"):
        envelope = decode(Envelope, claim.envelope)
        assert (envelope.handler, envelope.extra) == ("echo", {})
        assert decode_compressed(Task, claim.task) == line.task()


async def test_a_line_that_is_too_new_or_too_old_is_refused_with_what_to_do(queue: Queue) -> None:
    await queue.execute("SET", queue.key("schema"), 9)
    for look in (queue.check_schema, queue.look_at_schema):
        with pytest.raises(TooOld, match=f"has schema 9, this version reads .*{SCHEMA}: upgrade this installation"):
            await look()
    await queue.execute("SET", queue.key("schema"), OLDEST_SCHEMA - 1)
    with pytest.raises(ConfigError, match="finish the line's work with an older version"):
        await Queue(queue.redis, queue.config).check_schema()


CLAIMS: dict[str, Callable[[Queue], Awaitable[object]]] = {
    "claim": lambda queue: queue.claim("init", 1, "old"),
    "pop": lambda queue: queue.pop("train", 1, "old", 60.0),
    "pop by group": lambda queue: queue.pop_groups("train", 1, "old", 60.0),
    "pop by id": lambda queue: queue.pop_ids(["done.0"], "old", 60.0),
}


@pytest.mark.parametrize("verb", CLAIMS)
async def test_a_raised_line_gives_nothing_to_who_is_too_old(queue: Queue, newer: Queue, verb: str) -> None:
    """It need not have heard of the raise: the script refuses, and so it hears."""
    await line.put(queue, "done")
    await line.through(queue)
    await line.put(queue, "waits")
    assert await raise_schema(newer, NEXT) == NEXT
    assert not queue.outdated

    with pytest.raises(TooOld, match="upgrade this installation"):
        await CLAIMS[verb](queue)

    assert queue.outdated
    assert [await line.state(queue, id) for id in ("waits.0", "done.0")] == [("init", "ready"), ("done", "ready")]
    assert await CLAIMS[verb](newer)


async def test_who_is_too_old_finishes_what_it_has(queue: Queue, newer: Queue) -> None:
    """Commit, failure, beat and acknowledgement go through, and a claim whose reply was lost is repeated."""
    await line.put(queue, "g", 4)
    await line.through(queue, 1)
    claims = await queue.claim("init", 2, "old", "nonce")
    popped = await queue.pop("train", 1, "old-client", 60.0)
    await raise_schema(newer, NEXT)

    assert await queue.claim("init", 2, "old", "nonce") == claims
    held = [("init", claim.id, claim.token) for claim in claims]
    assert await queue.beat("old", {}, held) == [1, 1]
    assert await line.pass_on(queue, claims[0], "init") == "OK"
    lost = Failure(mode="loss", kind="worker", why="it ends")
    assert (await queue.fail("init", claims[1].id, claims[1].token, lost))[0] == "READY"
    assert await queue.take(popped) == ["OK"]
    assert queue.schema == SCHEMA, "what it still writes, it writes as it can"


async def test_who_is_too_old_enqueues_nothing(queue: Queue, newer: Queue) -> None:
    await raise_schema(newer, NEXT)
    await queue.tick()
    with pytest.raises(TooOld):
        await line.put(queue)
    assert await line.count(queue, "enqueued") == 0


@pytest.mark.parametrize("verb", ["beat", "tick"])
async def test_beat_and_tick_tell_the_lines_number(queue: Queue, newer: Queue, verb: str) -> None:
    await queue.execute("SET", queue.key("schema"), OLDEST_SCHEMA)
    for wanted in (OLDEST_SCHEMA, NEXT):
        await (queue.beat("w", None, []) if verb == "beat" else queue.tick())
        assert queue.line_schema == wanted
        await raise_schema(newer, NEXT)


async def test_a_server_that_came_back_empty_is_told_the_number(queue: Queue) -> None:
    await queue.execute("SET", queue.key("schema"), OLDEST_SCHEMA)
    await queue.check_schema()
    await queue.execute("FLUSHALL")
    await queue.beat("w", None, [])
    await queue.tick()
    assert await number(queue) == queue.line_schema == OLDEST_SCHEMA


async def test_a_raise_never_lowers_and_stops_claims_that_cannot_hear(queue: Queue, newer: Queue) -> None:
    assert await raise_schema(queue, 1) == 1
    await queue.execute("HSET", queue.key("credit", "run"), "train", 1)
    assert await raise_schema(newer, NEXT) == NEXT
    assert await raise_schema(queue, SCHEMA) == NEXT
    assert await number(queue) == NEXT
    for stage in ("init", "run", "eval", "done"):
        with pytest.raises(ResponseError, match="WRONGTYPE"):  # the first read of schema 1's claim.lua
            await queue.execute("HGET", queue.key("credit", stage), "train")


async def test_the_members_of_a_line_and_what_they_read(queue: Queue) -> None:
    """Two workers and two clients that say it; and of an older version a worker, one that popped, one that holds."""
    await line.put(queue, "g", 4)
    await line.through(queue, 4)
    await queue.beat("w-new", {"stage": "run", "version": "2.0", "reads": SCHEMA}, [])
    await queue.beat("w-old", {"stage": "eval", "version": "1.0"}, [])
    for name in ("c-new", "c-ended"):
        about = {"version": "2.0", "reads": SCHEMA, "life": 60}
        await queue.verb("beat", *queue.beat_arguments(name, about, [], 60))
        await queue.pop("train", 1, name, 60.0)
    await queue.execute("DEL", queue.key("client", "c-ended"))
    for name, of in (("c-popped", "groups"), ("c-holds", "done")):
        await queue.pop("train", 1, name, 60.0)
        await queue.execute("DEL", queue.key("claim", name, "done"))
        if of == "groups":
            await queue.execute("HSET", queue.key("claim", name, of), "nonce", "n", "got", "")
            await queue.execute("PEXPIRE", queue.key("claim", name, of), 3_590_000)

    found = await members(queue)

    assert [(item.name, item.kind, item.version, item.reads) for item in found] == [
        ("w-new", "run", "2.0", SCHEMA), ("w-old", "eval", "1.0", 1), ("c-new", "client", "2.0", SCHEMA),
        ("c-holds", "client", "", 1), ("c-popped", "client", "", 1),
    ]  # fmt: skip
    assert all(isinstance(item, Member) and 0 <= item.silent < 60 for item in found)


async def test_a_client_of_an_older_version_is_forgotten_after_its_last_claim(queue: Queue) -> None:
    await queue.execute("HSET", queue.key("claim", "c-old", "groups"), "nonce", "n", "got", "")
    await queue.execute("PEXPIRE", queue.key("claim", "c-old", "groups"), 3_000_000)
    (old,) = await members(queue)
    assert 600 <= old.silent < 660
    await queue.execute("DEL", queue.key("claim", "c-old", "groups"))
    assert await members(queue) == []


def test_a_payload_of_either_number_is_read() -> None:
    for old in range(OLDEST_SCHEMA, SCHEMA + 1):
        data = wire.compress({"state": {"a": 1}, "schema": old})
        assert decode_compressed(Payload, data) == Payload(state={"a": 1})
