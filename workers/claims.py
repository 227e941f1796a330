"""A worker's claims: who it is to the line, what it takes, and what goes back unbegun."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid

import redis.asyncio

from pipeline.envelope import Stage
from pipeline.errors import ConfigError, PayloadFolderAway, RedisUnavailable, TooOld, WorkerLost
from pipeline.leases import Claim, Failure
from pipeline.queue import Queue
from workers import scheduler
from workers.hosting import Hosting

log = logging.getLogger(__name__)

BELL_SECONDS = 1.0
BURST_SECONDS = 0.05
FULL_SECONDS = 0.1
"""Seconds at the doorbell: usually; of a worker that ends when nothing is left; where its host has no free place, since
no bell tells of one."""
BLIND_SECONDS = 0.5
"""Seconds between two looks for payload files that are out of reach."""


def worker_name(stage: str) -> str:
    """Unique for each process, and readable: stage, host, the Slurm job where there is one, pid."""
    job = scheduler.job()
    return "-".join(filter(None, (stage, socket.gethostname(), job, str(os.getpid()), uuid.uuid4().hex[:4])))


class Claims:
    """Claims of the worker `name` at one stage. `bell`: a client that may block."""

    def __init__(
        self, queue: Queue, bell: redis.asyncio.Redis, stage: Stage, name: str, hosting: Hosting, *, burst: bool
    ) -> None:
        self._queue, self._bell, self._stage, self._name, self._hosting = queue, bell, stage, name, hosting
        self._burst = burst
        self._blind_since: float | None = None
        self._wrong: ConfigError | None = None

    async def claim(self, wanted: int, *, wait: bool) -> list[Claim]:
        """Claim, after a wait at the doorbell where the last claim left nothing (a ring, or a second).

        Nothing while the line's payload files are out of reach. Never cancelled, and repeated with its nonce: where the
        reply was lost, the same leases come again. Raises RedisUnavailable after limits.outage.
        """
        if not await self._sees_files():
            return []
        nonce, stage, places = self._queue.nonce(), self._stage.value, self._hosting.places()
        try:
            if wait:
                seconds = BURST_SECONDS if self._burst else FULL_SECONDS if self._hosting.full else BELL_SECONDS
                claims = await self._queue.claim_at_bell(self._bell, seconds, stage, wanted, self._name, nonce, places)
                if claims is not None:
                    return claims
            return await self._queue.claim(stage, wanted, self._name, nonce, places)
        except TooOld:  # heard by now: the worker ends, what is in work does not
            return []
        except RedisUnavailable:
            outage = f"limits.outage = {self._queue.config.limits.outage:g} s is over"
            asked = self._queue.closing < float("inf")
            log.error("Redis is away, and %s: it ends", "this worker was asked to stop" if asked else outage)
            raise

    @property
    def blind(self) -> bool:
        """Whether the line's payload files are out of this machine's reach."""
        return self._blind_since is not None

    def lost_files(self, why: PayloadFolderAway) -> None:
        """The line's payload files are out of this machine's reach: nothing is claimed until they are back."""
        if self._blind_since is None:
            self._blind_since = time.monotonic()
            log.error("nothing is claimed until payload.dir is back: %s", why)
        if not self._queue.files.on:  # set on the line after this worker had started
            self._wrong = ConfigError(str(why))

    async def _sees_files(self) -> bool:
        if self._blind_since is None:
            return True
        queue = self._queue
        home = await queue.home()
        if home is None or await queue.files.run(queue.files.has_home, home.name):
            log.warning("the line's payload files are within reach again")
            self._blind_since = None
            return True
        if time.monotonic() - self._blind_since > queue.config.limits.outage:
            try:
                await queue.check_files(make=False)
            except ConfigError as error:
                self._wrong = error
        await asyncio.sleep(BLIND_SECONDS)
        return False

    @property
    def over(self) -> bool:
        """Whether this process may claim nothing more: it is too old for the line, or can't read its files."""
        return self._queue.outdated or self._wrong is not None

    def check(self) -> None:
        """Raises TooOld or ConfigError where it is over."""
        self._queue.check_current()
        if self._wrong is not None:
            raise self._wrong

    async def give_back(self, claims: list[Claim]) -> None:
        """What a claim brought after the signal to stop goes back unbegun; it counts nothing."""
        failure = Failure(mode="back", kind=WorkerLost.kind, why=f"worker {self._name} was stopping")
        for claim in claims:
            await self._queue.fail(self._stage.value, claim.id, claim.token, failure)

    async def none_left(self) -> bool:
        """Whether nothing waits at this stage, nor will when a delay is over."""
        queue, stage = self._queue, self._stage.value
        keys = [queue.key("ready", stage, lane) for lane in queue.config.line.lanes]
        if self._stage is Stage.INIT:
            keys += [queue.key("place", lane) for lane in queue.config.line.lanes]
        keys.append(queue.key("delayed", stage))
        return not any(await asyncio.gather(*(queue.execute("ZCARD", key) for key in keys)))
