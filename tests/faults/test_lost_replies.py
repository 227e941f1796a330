"""Replies that get lost: each verb has run on the server, and whoever sent it does not know."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config import Config
from tests.faults.proxy import VERBS, LosingProxy
from tests.faults.tools import Workers, starts, trainer


@pytest.mark.parametrize("cut", [True, False], ids=["closed", "silent"])
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
async def test_a_lost_reply_of_each_verb(workers: Workers, tmp_path: Path, cut: bool, times: int) -> None:
    log = tmp_path / "starts"
    socket = tmp_path / "proxy.sock"
    straight = workers.config
    # A silent reply is noticed after socket_timeout (+ 2 s where the client may block): leases must be longer.
    workers.config = straight.changed({"redis.url": f"unix://{socket}", "lease.seconds": 8.0})
    async with LosingProxy(socket, straight.redis.url.removeprefix("unix://"), cut=cut, times=times) as proxy:
        async with trainer(workers.config) as us:
            ids = await us.put(24, handler="fault_handlers:Recorded", starts=str(log), sleep=0.1)
            again = await us.put(24, handler="fault_handlers:Flaky")
            workers.line(4)
            (cancelled,) = await us.put(1, samples=1, sleep=30.0)
            await us.client.cancel([cancelled])
            await us.turn(8, 60.0)
            await hand_back(us.client.config)
            await us.collect(49, 60.0)
            (group,) = await by_group(us)
            us.got.update({rollout.id: rollout for rollout in group})
            assert us.got.pop(cancelled).outcome == "cancelled"
            us.check_scored(ids + again)
            assert set(starts(log).values()) == {1}, "a lost reply makes no rollout run twice"
            await asyncio.to_thread(workers.stop)  # the proxy must go on meanwhile
            us.got[cancelled] = us.got[ids[0]]
            await us.check_empty()
        for verb in (*VERBS, "payload"):
            # A client that closes gives back for a second at most; after a silent reply the leases end by themselves.
            wanted = 1 if verb == "hand_back" and not cut else times
            assert proxy.lost[verb] == wanted, f"the reply of {verb} was to be lost"


async def hand_back(config: Config) -> None:
    """Another consumer pops, and closes without an ack."""
    async with trainer(config) as other:
        await other.client.pop(4, timeout=30.0)


async def by_group(us) -> list:  # type: ignore[no-untyped-def,type-arg]
    """One more group, popped as one."""
    await us.put(2, samples=2)
    groups = await us.client.pop_groups(1, timeout=60.0)
    await us.client.ack(groups)
    return [group.rollouts for group in groups]
