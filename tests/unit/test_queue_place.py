"""The queue's verbs: rollouts that need a sandbox, the places that they take, and whether a sandbox is still wanted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline import inspect
from pipeline.audit import audit
from pipeline.leases import Claim, Places
from pipeline.queue import Queue
from tests import line

HERE = {"driver": "local", "name": "g.0-n-0", "host": "init-1"}
TEXT = json.dumps(HERE, sort_keys=True)


async def boxed(queue: Queue, group: str, samples: int = 1, **about: Any) -> list[str]:
    """Enqueue rollouts of a handler that is known to need a sandbox."""
    await queue.note_place("boxed", True)
    return await line.put(queue, group, samples, handler="boxed", **about)


async def claimed(queue: Queue, n: int, free: int, by_lane: dict[str, int] | None = None) -> list[Claim]:
    return await queue.claim("init", n, "init-1", places=Places(free, by_lane or {}))


async def rings(queue: Queue, *bell: str) -> int:
    return int(await queue.execute("LLEN", queue.key("bell", *bell)))


async def test_only_so_many_are_claimed_as_there_are_places(queue: Queue) -> None:
    await boxed(queue, "a", 3)
    await line.put(queue, "b", 2)

    first = await claimed(queue, 10, free=1)
    assert [claim.id for claim in first] == ["a.0", "b.0", "b.1"]
    assert [claim.place for claim in first] == ["train", "", ""]
    assert await claimed(queue, 10, free=0) == []
    assert [claim.id for claim in await claimed(queue, 10, free=5)] == ["a.1", "a.2"]
    assert await audit(queue) == []


async def test_the_oldest_goes_first_whether_or_not_it_needs_a_place(queue: Queue) -> None:
    await boxed(queue, "a")
    await line.put(queue, "b")
    await boxed(queue, "c")
    assert [claim.id for claim in await claimed(queue, 3, free=2)] == ["a.0", "b.0", "c.0"]


async def test_a_lane_takes_no_more_than_its_share_of_the_places(queue: Queue) -> None:
    await boxed(queue, "a", 4)
    await boxed(queue, "e", 4, lane="eval")
    got = await claimed(queue, 8, free=4, by_lane={"train": 1, "eval": 2})
    assert sorted(claim.id for claim in got) == ["a.0", "e.0", "e.1"]


async def test_a_claim_whose_reply_was_lost_names_the_same_places(queue: Queue) -> None:
    await boxed(queue, "a", 2)
    once = await queue.claim("init", 2, "w", "nonce", Places(2, {}))
    assert await queue.claim("init", 2, "w", "nonce", Places(0, {})) == once and once[0].place == "train"


async def test_what_turns_out_to_need_a_place_waits_for_one_and_counts_nothing(queue: Queue) -> None:
    (id,) = await line.put(queue)
    claim = await line.one(queue)
    assert await line.give_up(queue, claim, "init", "back", to="place") == "READY"
    assert await queue.claim("init", 1, "w") == []
    (again,) = await claimed(queue, 1, free=1)
    assert (again.id, again.attempt, again.losses) == (id, 1, 0)
    # and so after a retry, and after a loss in RUN
    assert await line.give_up(queue, again, "init", "attempt") == "READY"
    assert (await inspect.depth(queue))["init"]["place"]["train"] == 1
    assert await audit(queue) == []


@pytest.mark.parametrize("how", ["cancel", "deadline", "ttl"])
async def test_who_waits_for_a_place_can_be_ended(queue: Queue, how: str) -> None:
    about = {"deadline": {"deadline": 1.0}, "ttl": {"queue_ttl": 0.001}}.get(how, {})
    (id,) = await boxed(queue, "a", **about)
    if how == "cancel":
        assert await queue.cancel([id]) == ["REMOVED"]
    else:
        while not (await queue.tick()).over:
            pass
    assert await line.state(queue, id) == ("done", "ready")
    assert await claimed(queue, 1, free=1) == [] and await audit(queue) == []


async def test_it_can_be_seen_who_waits_for_a_place_and_why(queue: Queue) -> None:
    (id,) = await boxed(queue, "a")
    await queue.beat("init-1", {"stage": "init", "running": 0, "slots": 8, "sandboxes": 4, "max_live": 4}, [])
    assert (await inspect.depth(queue))["init"]["ready"]["train"] == 1
    assert [row["id"] for row in await inspect.page(queue, "init", "place")] == [id]
    assert "for a place: 4 of 4 sandboxes are live" in (await inspect.where(queue, [id]))[id].why


async def in_run(queue: Queue, restart: str = "run") -> Claim:
    """A rollout in RUN whose hash names HERE."""
    await boxed(queue, "g")
    (claim,) = await claimed(queue, 1, free=1)
    assert await line.pass_on(queue, claim, "init", sandbox=TEXT, restart=restart) == "OK"
    return await line.one(queue, "run", "run-1")


async def test_a_sandbox_is_wanted_by_its_attempt_and_by_the_hash_that_names_it(queue: Queue) -> None:
    await boxed(queue, "g")
    (claim,) = await claimed(queue, 1, free=1)
    mine, others = ("g.0", "", claim.token), ("g.0", "", "another")
    assert await queue.hosted([mine, others, ("nobody.0", TEXT, "")]) == [True, False, False]
    await line.pass_on(queue, claim, "init", sandbox=TEXT)
    assert await queue.hosted([("g.0", TEXT, claim.token), ("g.0", "another", claim.token)]) == [True, False]
    assert await queue.hosted([]) == []


@pytest.mark.parametrize("how", ["commit", "cancelled", "failed", "lost", "taken away"])
async def test_the_host_is_rung_when_its_sandbox_is_no_longer_named(queue: Queue, how: str) -> None:
    claim = await in_run(queue, "init")
    assert await rings(queue, "worker", "init-1") == 0
    if how == "commit":
        await line.pass_on(queue, claim, "run", sandbox="")
    elif how == "cancelled":
        await queue.cancel([claim.id])
        await line.give_up(queue, claim, "run", "back")
    elif how == "failed":
        await line.give_up(queue, claim, "run", "fatal")
    elif how == "lost":
        await queue.tick()
        await line.silence(queue, "run", claim.id)
        await queue.tick()
        assert await line.state(queue, claim.id) == ("init", "ready")
    else:
        assert await queue.leave_sandbox([claim.id, "nobody.0"]) == [True, False]
    assert await rings(queue, "worker", "init-1") == 1
    assert await queue.hosted([("g.0", TEXT, "n-0")]) == [False]


async def test_a_lost_run_that_can_be_gone_on_with_keeps_its_sandbox(queue: Queue) -> None:
    claim = await in_run(queue)
    await queue.tick()
    await line.silence(queue, "run", claim.id)
    await queue.tick()
    assert await line.state(queue, claim.id) == ("run", "ready")
    assert await queue.hosted([("g.0", TEXT, "")]) == [True] and await rings(queue, "worker", "init-1") == 0
    again = await line.one(queue, "run", "run-2")
    assert await line.give_up(queue, again, "run", "loss", to="init") == "READY"
    assert await line.state(queue, claim.id) == ("init", "ready") and await rings(queue, "worker", "init-1") == 1


async def test_who_is_silent_and_for_how_long(queue: Queue) -> None:
    assert await queue.silent("init-1") is None
    await queue.beat("init-1", {"stage": "init"}, [])
    assert 0 <= (await queue.silent("init-1") or 0) < 5
