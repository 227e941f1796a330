"""Each guard of the queue is needed: with it removed from the scripts' text, the same storm of faults breaks a promise.

The storm is small and made of the verbs alone: workers that stall and come back, replies that get lost, outages.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from pipeline import scripts
from pipeline.leases import Claim
from pipeline.queue import Queue
from tests import line
from tests.services import RedisService

STAGES = ("init", "run", "eval")

GUARDS = {
    "fence": ("commit", "if v[1] ~= token then", "if false then", "was committed twice"),
    "spent token": ("commit", "if v[2] == token then return 'AGAIN' end", "", "told that it was stale"),
    "nonce": ("claim", "if redis.call('HGET', memo, 'nonce') == A[5] then", "if false then", "in nobody's hands"),
    "late request": ("claim", "if overtaken(memo, A[5]) then return out end", "", "in nobody's hands"),
    "blindness": ("tick", "if not blind then", "if true then", "from under a living worker"),
    "fence of fail": ("fail", "if v[1] ~= token then", "if false then", "that no longer had it"),
    "payload in place of another": (
        "commit",
        "if v[4] and v[4] ~= '' and v[4] ~= A[6] then",
        "if false then",
        "left for ever",
    ),
}


@pytest.fixture
async def queue(redis_service: RedisService) -> AsyncIterator[Queue]:
    calm = redis_service.config.changed({"lease.seconds": 30.0, "lease.beat": 10.0, "retry.losses": 1000})
    async with redis_service.client() as client:
        yield Queue(client, calm.changed({"retry.attempts": 1000}))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Removes one guard from the scripts."""
    original = scripts.text

    def remove(verb: str, guard: str, instead: str) -> None:
        assert original(verb).count(guard) == 1, f"{verb}.lua does not hold this guard (any more): {guard}"
        changed = original(verb).replace(guard, instead)
        monkeypatch.setattr(scripts, "text", lambda name: changed if name == verb else original(name))
        scripts.sha.cache_clear()

    yield remove
    monkeypatch.undo()
    scripts.sha.cache_clear()


class Storm:
    """Three workers, 12 rollouts, 300 steps. `broken` are the promises that did not hold."""

    def __init__(self, queue: Queue, seed: int) -> None:
        self.queue = queue
        self.random = random.Random(seed)
        self.held: dict[str, list[tuple[str, Claim]]] = {"w0": [], "w1": [], "w2": []}
        self.asked: dict[tuple[str, str], list[str]] = {}
        self.commits: Counter[tuple[str, str]] = Counter()
        self.broken: set[str] = set()

    async def run(self) -> set[str]:
        for number in range(4):
            await line.put(self.queue, f"g{number}", 3)
        steps = (self.claim, self.claim, self.commit, self.commit, self.commit, self.give_up, self.stall, self.outage)
        for _ in range(300):
            await self.random.choice(steps)()
            await self.look()
        for (id, stage), count in self.commits.items():
            if count > 1:
                self.broken.add(f"{stage} of {id} was committed twice")
        return self.broken

    def pick(self) -> tuple[str, str, Claim] | None:
        """A worker, and a lease that it holds or believes to hold."""
        worker = self.random.choice(sorted(self.held))
        if not self.held[worker]:
            return None
        stage, claim = self.random.choice(self.held[worker])
        return worker, stage, claim

    async def claim(self) -> None:
        worker, stage = self.random.choice(sorted(self.held)), self.random.choice(STAGES)
        nonce = self.queue.nonce()
        claims = await self.queue.claim(stage, 2, worker, nonce)
        if self.random.random() < 0.3:  # the reply is lost: it is sent again
            claims = await self.queue.claim(stage, 2, worker, nonce)
        self.held[worker] += [(stage, claim) for claim in claims]
        earlier = self.asked.setdefault((worker, stage), [])
        if (
            earlier and self.random.random() < 0.2
        ):  # one that its worker has given up arrives now: nobody hears the reply
            await self.queue.claim(stage, 2, worker, earlier[-1])
        earlier.append(nonce)

    async def commit(self) -> None:
        picked = self.pick()
        if picked is None:
            return
        worker, stage, claim = picked
        self.held[worker].remove((stage, claim))
        reply = await line.pass_on(self.queue, claim, stage, payload=claim.token.encode())
        self.commits[claim.id, stage] += reply == "OK"
        if self.random.random() < 0.3:
            again = await line.pass_on(self.queue, claim, stage, payload=claim.token.encode())
            self.commits[claim.id, stage] += again == "OK"
            if reply == "OK" and again == "STALE":
                self.broken.add(f"{claim.id} was accepted, and its worker was told that it was stale")

    async def give_up(self) -> None:
        picked = self.pick()
        if picked is not None:
            worker, stage, claim = picked
            self.held[worker].remove((stage, claim))
            ours = await self.is_current(stage, claim)
            if await line.give_up(self.queue, claim, stage, "loss") == "READY" and not ours:
                self.broken.add(f"{claim.id} was given up by a worker that no longer had it")

    async def stall(self) -> None:
        """A worker stalls; its lease runs out, but it comes back later and goes on."""
        picked = self.pick()
        if picked is not None:
            await self.queue.tick()
            await line.silence(self.queue, picked[1], picked[2].id)
            await self.queue.tick()

    async def outage(self) -> None:
        """Redis is away for longer than a lease. The first tick comes before the owners' beats."""
        if self.random.random() > 0.2:
            return
        for held in self.held.values():
            held[:] = [item for item in held if await self.is_current(*item)]
        for stage in STAGES:
            for id in await self.queue.execute("ZRANGE", self.queue.key("lease", stage), 0, -1):
                await line.silence(self.queue, stage, id.decode())
        await self.queue.execute("SET", self.queue.key("tick"), 1)
        await self.queue.tick()
        for worker, held in self.held.items():
            replies = await self.queue.beat(worker, {}, [(stage, claim.id, claim.token) for stage, claim in held])
            if any(reply != 1 for reply in replies):
                self.broken.add(f"a rollout was taken from under a living worker ({worker})")
        await self.queue.execute("SET", self.queue.key("blind"), 1)

    async def is_current(self, stage: str, claim: Claim) -> bool:
        return await line.field(self.queue, claim.id, "token") == claim.token

    async def look(self) -> None:
        """Every lease is in somebody's hands; every payload that lasts is the one its rollout names."""
        hands = {claim.token for held in self.held.values() for _, claim in held}
        for stage in STAGES:
            for raw in await self.queue.execute("ZRANGE", self.queue.key("lease", stage), 0, -1):
                token = await line.field(self.queue, raw.decode(), "token")
                if token not in hands:
                    self.broken.add(f"{raw.decode()} is leased and in nobody's hands")
        for raw in await self.queue.execute("KEYS", self.queue.key("p", "*")):
            _, _, id, token = raw.decode().split(":")
            if await self.queue.execute("TTL", raw) < 0 and await line.field(self.queue, id, "payload") != token:
                self.broken.add(f"payload {token} of {id} is left for ever")


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_with_all_guards_every_promise_holds(queue: Queue, seed: int) -> None:
    assert await Storm(queue, seed).run() == set()


@pytest.mark.parametrize("guard", GUARDS)
async def test_without_a_guard_a_promise_breaks(queue: Queue, without, guard: str) -> None:  # type: ignore[no-untyped-def]
    verb, text, instead, breaks = GUARDS[guard]
    without(verb, text, instead)
    broken = await Storm(queue, 1).run()
    assert any(part in sentence for sentence in broken for part in breaks.split("|")), broken
