"""The bound on new rollouts: (max_staleness + updates + 1) x batch, less what is begun and popped; by groups."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import fakeredis
from hypothesis import given, settings, strategies as st

from pipeline.backends import Backends
from pipeline.config import Config
from pipeline.inspect import admission, begun, depth
from pipeline.leases import Claim, Places
from pipeline.missing import why_missing
from pipeline.queue import Queue
from tests import line


async def run(queue: Queue, batch: int = 2, max_staleness: int = 0, version: int = 1) -> Backends:
    backends = Backends(queue)
    await backends.start(version, "", batch=batch, max_staleness=max_staleness, lane="train")
    return backends


async def update(backends: Backends, version: int) -> None:
    await backends.pause("t", 60.0, "weights", "keep", version)
    assert await backends.commit("t", version, "")


async def singles(queue: Queue, count: int, name: str = "g", **about: Any) -> list[str]:
    """So many groups of one rollout."""
    return [id for n in range(count) for id in await line.put(queue, f"{name}{n}", **about)]


async def claimed(queue: Queue, n: int = 99, worker: str = "w") -> int:
    return len(await queue.claim("init", n, worker))


async def test_without_a_run_nothing_is_bounded(queue: Queue) -> None:
    await line.put(queue, samples=9)
    assert await claimed(queue) == 9
    assert await admission(queue) is None


async def test_no_more_is_begun_than_two_batches_at_staleness_1_and_an_update_admits_one_more(queue: Queue) -> None:
    backends = await run(queue, batch=2, max_staleness=1)
    await singles(queue, 9)
    assert [await claimed(queue) for _ in range(2)] == [4, 0]
    await update(backends, 2)
    assert [await claimed(queue) for _ in range(2)] == [2, 0]


async def test_a_scored_and_acked_rollout_keeps_its_place_and_others_leave_it(queue: Queue) -> None:
    await run(queue, batch=2)
    await singles(queue, 9)
    claims = await queue.claim("init", 9, "w")
    for claim in claims:
        await line.pass_on(queue, claim, "init")
    await line.pass_on(queue, await line.one(queue, "run"), "run")
    await line.pass_on(queue, await line.one(queue, "eval"), "eval")
    await line.pop_and_take(queue)
    assert await claimed(queue) == 0, "popped counts as well as begun"
    assert await line.give_up(queue, await line.one(queue, "run"), "run", "fatal") == "FAILED"
    assert await claimed(queue) == 1, "a failed one has left its place before its ack"


async def test_a_drop_frees_the_place_and_is_counted(queue: Queue) -> None:
    backends = await run(queue, batch=1)
    await singles(queue, 3)
    await line.through(queue)
    popped = await queue.pop("train", 1, "t", 60)
    assert await queue.take(popped, drop=True) == ["OK"]
    assert await queue.take(popped, drop=True) == ["AGAIN"]
    policy = (await backends.view()).policy
    assert (policy.popped, policy.dropped, await line.count(queue, "dropped")) == (0, 1, 1)
    assert await queue.execute("LLEN", queue.key("bell", "init")) == 1
    assert await claimed(queue) == 1


async def test_a_retry_stays_begun_wherever_it_goes_on(queue: Queue) -> None:
    """A new one in its place would keep it out for ever where the trainer waits for its whole group."""
    await run(queue, batch=1)
    await line.put(queue, "old", samples=1)
    await line.put(queue, "new", samples=1, priority=5)
    await line.pass_on(queue, await line.one(queue), "init")
    assert await line.give_up(queue, await line.one(queue, "run"), "run", "attempt") == "READY"
    assert (await begun(queue, "train"), await claimed(queue)) == (1, 0)
    assert await line.give_up(queue, await line.one(queue, "run"), "run", "loss", to="init") == "READY"
    assert await begun(queue, "train") == 1
    again = await line.one(queue)
    assert again.id == "new.0", "the one that had begun"
    assert await line.give_up(queue, again, "init", "attempt", delay=60.0) == "DELAYED"
    assert (await begun(queue, "train"), await claimed(queue)) == (1, 0)


async def test_a_group_begins_whole(queue: Queue) -> None:
    """However small the bound is: else a trainer that pops groups would wait for ever."""
    backends = await run(queue, batch=3)
    for name in ("a", "b", "c"):
        await line.put(queue, name, samples=2)
    await line.put(queue, "wide", samples=9)
    assert sorted(claim.id for claim in await queue.claim("init", 1, "w")) == ["a.0"]
    await line.put(queue, "urgent", samples=2, priority=9)
    assert [claim.id for claim in await queue.claim("init", 2, "w")] == ["a.1", "urgent.0"]
    assert [claim.id for claim in await queue.claim("init", 9, "w")] == ["urgent.1"]
    assert (await begun(queue, "train"), await claimed(queue)) == (4, 0), "of 3: over by less than a group"
    await update(backends, 2)
    assert [claim.id for claim in await queue.claim("init", 9, "w")] == ["b.0", "b.1"]
    for version in (3, 4):
        await update(backends, version)
    assert len(await queue.claim("init", 99, "w")) == 2 + 9
    await line.put(queue, "wide", samples=12)
    assert await claimed(queue) == 3, "further members of a group that has begun"


async def test_what_began_before_the_bound_was_set_is_finished_beginning(queue: Queue) -> None:
    await line.put(queue, "a", samples=2)
    await line.put(queue, "b", samples=2)
    first = await line.one(queue)
    await run(queue, batch=1)
    assert [claim.id for claim in await queue.claim("init", 9, "w")] == ["a.1"]
    assert first.id == "a.0" and await begun(queue, "train") == 2


async def test_a_cancelled_rollout_leaves_its_place(queue: Queue) -> None:
    await run(queue, batch=1)
    ids = await singles(queue, 2)
    await line.pass_on(queue, await line.one(queue), "init")
    assert await queue.cancel(ids[:1]) == ["REMOVED"]
    assert (await line.one(queue)).id == ids[1]
    assert await queue.cancel(ids[1:]) == ["ASKED"]
    assert await begun(queue, "train") == 1, "its worker still has it"


async def test_other_lanes_are_never_bound(queue: Queue) -> None:
    await run(queue, batch=1)
    await singles(queue, 5, "a")
    await singles(queue, 5, "b", lane="eval")
    lanes = [await line.field(queue, claim.id, "lane") for claim in await queue.claim("init", 99, "w")]
    assert (lanes.count("train"), lanes.count("eval")) == (1, 5)


async def test_the_bound_holds_where_rollouts_wait_for_a_place(queue: Queue) -> None:
    backends = await run(queue, batch=3)
    await queue.note_place("echo", True)
    await singles(queue, 4, "placed", handler="echo")
    await queue.note_place("echo", False)
    await singles(queue, 4, "plain")
    places = Places(8, {})
    first = await queue.claim("init", 99, "w", places=places)
    assert [claim.place for claim in first] == ["train"] * 3
    await update(backends, 2)
    second = await queue.claim("init", 99, "w", places=places)
    assert [claim.place for claim in second] == ["train", "", ""]


async def test_bells_ring_when_the_bound_rises(queue: Queue) -> None:
    backends = await run(queue, batch=1)
    await singles(queue, 3)
    await line.pass_on(queue, await line.one(queue), "init")
    assert await claimed(queue) == 0
    assert await queue.execute("LLEN", queue.key("bell", "init")) == 0, "nothing that could be claimed: no stale rings"
    await update(backends, 2)
    assert await queue.execute("LLEN", queue.key("bell", "init")) == 1
    assert await claimed(queue) == 1
    assert await claimed(queue) == 0
    await line.give_up(queue, await line.one(queue, "run"), "run", "fatal")
    assert await queue.execute("LLEN", queue.key("bell", "init")) == 1


async def test_a_new_start_of_the_run_counts_from_zero(queue: Queue) -> None:
    backends = await run(queue, batch=2, version=7)
    await singles(queue, 9)
    await line.through(queue, 2)
    await line.pop_and_take(queue, 1)
    await update(backends, 8)
    assert (await backends.view()).policy.bound == 3
    await run(queue, batch=2, version=7)
    policy = (await backends.view()).policy
    assert (policy.version, policy.updates, policy.popped, policy.bound, policy.ordinal) == (7, 0, 0, 2, 3)
    assert await claimed(queue) == 1, "the one that nobody acked is in the line"


async def test_why_a_rollout_waits_names_the_bound(queue: Queue) -> None:
    await run(queue, batch=1)
    ids = await singles(queue, 2)
    await queue.beat("w1", {"stage": "init", "running": 0, "slots": 1}, [])
    await line.one(queue)
    depths = await depth(queue)
    assert (depths["init"]["weights"], depths["run"]["weights"]) == ({"train": 1, "eval": 0}, {"train": 0, "eval": 0})
    why = (await why_missing(queue, "train", ids))[ids[1]]
    assert why.startswith("waits 0 s in init for weights: 1 of 1 rollouts are begun and not acked")


# -- the model: what may be begun, whatever happened before -----------------------------------------------------------


class Trial:
    """A line and a trainer, driven by a list of moves; counts for itself what the bound should be."""

    def __init__(self, queue: Queue, batch: int, staleness: int, dice: random.Random) -> None:
        self.queue, self.batch, self.staleness, self.dice = queue, batch, staleness, dice
        self.backends = Backends(queue)
        self.version = 1
        self.popped = 0
        self.begun: set[str] = set()
        self.waiting: set[str] = set()
        self.members: dict[str, list[str]] = {}
        self.held: list[tuple[str, Claim]] = []
        self.dropping = True

    @property
    def free(self) -> int:
        return (self.staleness + self.version) * self.batch - self.popped - len(self.begun)

    async def start(self) -> None:
        await self.backends.start(1, "", batch=self.batch, max_staleness=self.staleness, lane="train")

    async def put(self) -> None:
        group = f"g{self.dice.random()}"
        self.members[group] = await line.put(self.queue, group, samples=self.dice.randint(1, 5))
        self.waiting |= set(self.members[group])

    async def claim(self) -> None:
        n = self.dice.randint(1, 6)
        got = await self.queue.claim("init", n, "w")
        for claim in got:
            assert claim.id in self.waiting
            if claim.id not in self.begun:
                assert self.free > 0 and not self.begun & self.waiting, "groups that have begun go first"
                self.begun |= self.waiting & set(self.members[claim.id.rpartition(".")[0]])
            self.waiting.discard(claim.id)
        self.held += [("init", claim) for claim in got]
        assert len(got) == n or not self.waiting or (self.free <= 0 and not self.begun & self.waiting)

    async def work(self) -> None:
        for stage in ("run", "eval"):
            self.held += [(stage, claim) for claim in await self.queue.claim(stage, 3, "w")]
        if self.held:
            stage, claim = self.held.pop(self.dice.randrange(len(self.held)))
            assert await line.pass_on(self.queue, claim, stage) == "OK"

    async def fail(self) -> None:
        if not self.held:
            return
        stage, claim = self.held.pop(self.dice.randrange(len(self.held)))
        mode, to = self.dice.choice((("fatal", ""), ("back", ""), ("back", "init"), ("loss", ""), ("attempt", "")))
        delay = self.dice.choice((0.0, 0.0, 0.001))
        reply = await line.give_up(self.queue, claim, stage, mode, to=to, delay=delay)
        if reply == "FAILED":
            self.begun.discard(claim.id)
        elif reply == "READY" and (stage == "init" or to == "init"):
            self.waiting.add(claim.id)
        await self.settle()

    async def settle(self) -> None:
        """What was delayed is ready again."""
        for stage in ("init", "run", "eval"):
            for id in await self.queue.execute("ZRANGE", self.queue.key("delayed", stage), 0, -1):
                await self.queue.execute("ZADD", self.queue.key("delayed", stage), 1, id)
                if stage == "init":
                    self.waiting.add(id.decode())
        await self.queue.tick()

    async def cancel(self) -> None:
        known = sorted((self.begun | self.waiting) - {claim.id for _, claim in self.held})
        if known:
            id = self.dice.choice(known)
            if await self.queue.cancel([id]) == ["REMOVED"]:
                self.waiting.discard(id)
                self.begun.discard(id)

    async def ack(self) -> None:
        popped = await self.queue.pop("train", self.dice.randint(1, 4), "t", 60)
        scored = {item.id for item in popped if await line.field(self.queue, item.id, "outcome") == "scored"}
        drop = self.dropping and self.dice.random() < 0.3
        await self.queue.take(popped, drop=drop)
        self.begun -= {item.id for item in popped}
        self.popped += 0 if drop else len(scored)

    async def update(self) -> None:
        self.version += 1
        await update(self.backends, self.version)

    async def check(self) -> None:
        assert await begun(self.queue, "train") == len(self.begun)
        state = (await self.backends.view()).policy
        assert (state.popped, state.updates) == (self.popped, self.version - 1)

    async def drain(self) -> None:
        """A trainer that goes on updating gets everything: no move may have left a place taken for ever."""
        self.dropping = False
        for _ in range(400):
            await self.settle()
            if not (self.waiting or self.begun or self.held):
                return
            await self.claim()
            while self.held or await self._ready("run") or await self._ready("eval"):
                await self.work()
            while await self._ready("done"):
                await self.ack()
            await self.update()
        raise AssertionError(f"stuck: {self.waiting} wait, {self.begun} are begun, {self.free} places are free")

    async def _ready(self, stage: str) -> int:
        return int(await self.queue.execute("ZCARD", self.queue.key("ready", stage, "train")))


MOVES = ("put", "claim", "claim", "work", "work", "work", "fail", "cancel", "ack", "update")


@given(st.lists(st.sampled_from(MOVES), max_size=60), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2**31))
@settings(max_examples=15)
def test_never_more_than_the_bound_and_never_stuck(moves: list[str], batch: int, staleness: int, seed: int) -> None:
    async def trial() -> None:
        async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(), protocol=2) as client:
            trial = Trial(Queue(client, Config()), batch, staleness, random.Random(seed))
            await trial.start()
            await trial.put()
            for move in moves:
                step: Callable[[], Awaitable[None]] = getattr(trial, move)
                await step()
                await trial.check()
            await trial.drain()

    asyncio.run(trial())


async def test_a_run_that_is_over_bounds_nothing_and_only_its_owner_or_a_person_ends_it(queue: Queue) -> None:
    backends = Backends(queue)
    await backends.start(1, "", batch=2, max_staleness=0, lane="train", owner="a")
    await singles(queue, 5)
    assert await claimed(queue) == 2
    assert not await backends.end_run("b") and await claimed(queue) == 0
    assert "in the run that a started" in str(await admission(queue))
    assert await backends.end_run("a") and await claimed(queue) == 3
    assert not await backends.end_run()
