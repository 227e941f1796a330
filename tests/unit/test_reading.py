"""Records of popped rollouts: page by page, in order, each fault its own, and few payloads in memory at once."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from pipeline import reading, wire
from pipeline.builder import TrajectoryBuilder
from pipeline.envelope import SCHEMA, Payload, encode_compressed
from pipeline.leases import Popped
from pipeline.queue import Queue
from pipeline.results import Rollout, read
from pipeline.wire import pack
from tests import line

LONG = 8_000
"""Tokens whose payload is so large that a page of them is decompressed in a thread."""


def spoken(seed: int, count: int) -> bytes:
    chance = np.random.default_rng(seed)
    builder = TrajectoryBuilder()
    builder.prompt([seed])
    builder.action(chance.integers(0, 150_000, count).tolist(), (-chance.random(count)).tolist(), [(1, 0, count)])
    return encode_compressed(Payload(trajectory=builder.build()), SCHEMA)


async def popped(queue: Queue, count: int, tokens: int) -> list[Popped]:
    """So many finished rollouts, leased; rollout i's first token is i."""
    ids = await line.put(queue, samples=count)
    for stage in ("init", "run", "eval"):
        for claim in await queue.claim(stage, count, "w"):
            about = {"result": pack({"reward": 1.0})} if stage == "eval" else {}
            if stage == "run":
                await queue.write_payload(claim.id, claim.token, spoken(ids.index(claim.id), tokens), 60)
            await line.pass_on(queue, claim, stage, written=stage == "run", **about)
    leases = await queue.pop("train", count, "trainer", 60)
    return sorted(leases, key=lambda lease: ids.index(lease.id))


def first_token(rollout: Rollout) -> int:
    assert rollout.trajectory is not None, rollout.failure
    return int(rollout.trajectory.sequences[0].token_ids[0])


@pytest.mark.parametrize("tokens", [3, LONG])
async def test_each_lease_gets_its_own_record_in_order(queue: Queue, tokens: int) -> None:
    leases = (await popped(queue, 2 * reading.PAGE + 3, tokens))[::-1]
    rollouts = await reading.read_all(queue, leases)
    assert [rollout.id for rollout in rollouts] == [lease.id for lease in leases]
    assert [first_token(rollout) for rollout in rollouts] == list(range(len(leases)))[::-1]
    assert {rollout.reward for rollout in rollouts} == {1.0}


async def test_nothing_leased_is_nothing_read(queue: Queue) -> None:
    assert await reading.read_all(queue, []) == []


async def test_bytes_that_do_not_decode_fail_their_own_rollout_alone(queue: Queue) -> None:
    leases = await popped(queue, reading.PAGE + 2, LONG)
    keys = [queue.key("p", leases[at].id, await payload_token(queue, leases[at])) for at in (1, 3)]
    whole = await queue.execute("GET", keys[0])
    await queue.execute("SET", keys[0], whole[:-9] + bytes(9))
    await queue.execute("DEL", keys[1])

    rollouts = await reading.read_all(queue, leases)

    broken = [at for at, rollout in enumerate(rollouts) if rollout.outcome != "scored"]
    assert broken == [1, 3]
    assert [rollouts[at].failure.kind for at in broken] == ["envelope"] * 2  # type: ignore[union-attr]
    assert [first_token(rollout) for rollout in rollouts if rollout.outcome == "scored"] == [
        at for at in range(len(leases)) if at not in broken
    ]


async def payload_token(queue: Queue, lease: Popped) -> str:
    return str((await queue.execute("HGET", queue.key("r", lease.id), "payload")).decode())


@pytest.mark.parametrize("tokens", [3, LONG])
async def test_few_payloads_are_in_memory_at_once(queue: Queue, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """And long ones are decompressed in threads, short ones where they are."""
    count = 3 * reading.PAGE * reading.PAGES
    leases = await popped(queue, count, tokens)
    lock, held, most, threads = threading.Lock(), 0, 0, set()
    fetch, inflate = queue.read_payload, wire.inflate

    async def counted_fetch(id: str, token: str) -> bytes | None:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        return await fetch(id, token)

    def counted_read(*about: object, inflated: bool) -> Rollout:
        nonlocal held
        with lock:
            held -= 1
        return read(*about, inflated=inflated)  # type: ignore[arg-type]

    def seen_inflate(data: bytes) -> bytes:
        threads.add(threading.current_thread())
        return inflate(data)

    monkeypatch.setattr(queue, "read_payload", counted_fetch)
    monkeypatch.setattr("pipeline.reading.read", counted_read)
    monkeypatch.setattr("pipeline.wire.inflate", seen_inflate)
    rollouts = await reading.read_all(queue, leases)

    assert len(rollouts) == count
    assert most <= reading.PAGE * reading.PAGES
    assert (threading.current_thread() in threads) == (tokens != LONG)


async def test_what_can_not_be_read_raises_and_leaves_no_task_behind(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = await popped(queue, 3 * reading.PAGE, 3)

    async def away(id: str, token: str) -> bytes | None:
        raise ConnectionError(f"no answer about {id} {token}")

    monkeypatch.setattr(queue, "read_payload", away)
    with pytest.raises(ConnectionError, match="no answer"):
        await reading.read_all(queue, leases)
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
