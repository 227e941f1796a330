"""The audit while the line works: it finds nothing in a sound line, however fast that moves."""

from __future__ import annotations

import asyncio
import random
import time

from pipeline.audit import audit
from pipeline.queue import Queue
from tests.line import give_up, pass_on, put
from tests.services import RedisService

SECONDS = 3.0


async def churn(queue: Queue, name: str, until: float) -> int:
    """Enqueue, claim, commit, fail, cancel, pop, give back and ack, as fast as Redis answers; how many were acked."""
    chance, acked, number = random.Random(name), 0, 0
    while time.monotonic() < until:
        number += 1
        ids = await put(queue, f"{name}-{number}", chance.randint(1, 4))
        if chance.random() < 0.2:
            await queue.cancel([chance.choice(ids)])
        for stage in ("init", "run", "eval"):
            for claim in await queue.claim(stage, 5, name):
                dice = chance.random()
                if dice < 0.1:
                    await give_up(queue, claim, stage, chance.choice(["attempt", "loss", "back", "fatal"]))
                elif dice < 0.3:
                    await queue.write_payload(claim.id, claim.token, b"x" * 100, 60)
                    await pass_on(queue, claim, stage, written=True)
                else:
                    await pass_on(queue, claim, stage, payload=b"small")
        popped = await queue.pop("train", 4, name, 60) if chance.random() < 0.8 else []
        if chance.random() < 0.2:
            await queue.hand_back(popped)
        else:
            acked += (await queue.take(popped)).count("OK")
    return acked


async def test_traffic_is_no_finding(redis_service: RedisService) -> None:
    looks = 0
    async with redis_service.client() as client, redis_service.client() as other:
        queue = Queue(client, redis_service.config)
        until = time.monotonic() + SECONDS
        work = [asyncio.create_task(churn(queue, name, until)) for name in "abcd"]
        while time.monotonic() < until:
            assert await audit(Queue(other, redis_service.config)) == []
            looks += 1
        assert sum(await asyncio.gather(*work)) > 50
        assert await audit(queue) == []
    assert looks > 3
