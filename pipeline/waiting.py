"""A trainer is never left waiting without a word: while it waits, whatever keeps the line from going on is named.

`Watch` looks every LOOK seconds, on a connection of its own, and logs a sentence when it has seen the same trouble for
STEADY seconds, again every SAY_AGAIN, and once more when it is over. pipeline/trouble.py says what a trouble is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.connection import connect
from pipeline.errors import ServiceError
from pipeline.queue import Queue
from pipeline.trouble import troubles

log = logging.getLogger(__name__)

LOOK = 1.5
"""Seconds between two looks."""

STEADY = 1.0
"""Seconds for which a trouble must have been there, so that it was seen twice."""

STEADY_LONG, SLOW = 4.0, ("policy", "servers", "unpopped")
"""The same for these: many an update of the weights is over by then, and what lies there is popped."""

BACK = 4.0
"""Seconds after an absence of Redis in which workers tell it again that they live."""

SAY_AGAIN = 60.0
"""Seconds until a trouble that lasts is told again."""

ANSWER = 3.0
"""Seconds in which Redis must answer one look; it is silent otherwise."""


IDLE = ("nothing", "elsewhere", "unpopped")
"""Troubles that a delivery shows to be none."""


@dataclass(slots=True)
class _Seen:
    since: float
    sentence: str
    said: float | None = None


class Watch:
    """Looks after one lane of one client while anything waits there: `async with watch:` around each wait.

    What it has seen outlives a wait, so that a trainer that asks for a second at a time is told as well.
    """

    def __init__(self, config: Config, lane: str, consumer: str) -> None:
        self._config, self._lane, self._consumer = config, lane, consumer
        self._waits = 0
        self._looking: asyncio.Task[None] | None = None
        self._looked = self._away = float("-inf")
        self._seen: dict[str, _Seen] = {}

    async def __aenter__(self) -> Self:
        self._waits += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on(), name=f"watch-{self._lane}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._waits -= 1
        if self._waits == 0 and self._looking is not None:
            looking, self._looking = self._looking, None
            looking.cancel()
            await asyncio.wait({looking})

    def delivered(self) -> None:
        """Something has come: the lane was not idle, whatever a look a moment ago has seen."""
        for kind in IDLE:
            self._over(kind)

    async def _look_on(self) -> None:
        now = time.monotonic()
        if now - self._looked > 2 * LOOK + ANSWER:  # nobody has waited lately
            self._looked = now
            self._seen = {kind: seen for kind, seen in self._seen.items() if seen.said is not None}
        queue = None
        try:
            await asyncio.sleep(max(0.0, self._looked + LOOK - now))  # most waits are over before
            queue = Queue(connect(self._config), self._config)
            while self._looking is asyncio.current_task():  # a cancel inside redis-py may get lost on Python 3.11
                self._looked = time.monotonic()
                self._heard(await self._look(queue))
                await asyncio.sleep(LOOK)
        except Exception:  # nothing waits for this task: its fault must not pass unseen
            log.exception("the watch over lane %s broke: what keeps it from going on is not told", self._lane)
        finally:
            if queue is not None:
                await queue.pipe.close()
                await queue.redis.aclose()

    async def _look(self, queue: Queue) -> Mapping[str, str]:
        """What is wrong now, by kind; each with a sentence."""
        try:
            async with asyncio.timeout(ANSWER):
                return await troubles(queue, self._lane, self._consumer)
        except (TimeoutError, ServiceError, RedisError, OSError) as error:
            if isinstance(error, ServiceError):  # a sentence already
                return {"redis": str(error)}
            about = f" ({error})" if str(error) else f" within {ANSWER:g} s"
            return {"redis": f"Redis does not answer{about}. Is it running? `rollout doctor` looks"}

    def _heard(self, found: Mapping[str, str]) -> None:
        now = time.monotonic()
        for kind, sentence in found.items():
            seen = self._seen.setdefault(kind, _Seen(now, sentence))
            seen.sentence = sentence
            if self._is_steady(kind, seen, now) and (seen.said is None or now - seen.said >= SAY_AGAIN):
                seen.said = now
                log.warning("waiting in lane %s: %s", self._lane, sentence)
        if "redis" in found:  # of all else nothing is known now
            self._away = now
            return
        for kind in [kind for kind in self._seen if kind not in found]:
            self._over(kind)

    def _over(self, kind: str) -> None:
        seen = self._seen.pop(kind, None)
        if seen is not None and seen.said is not None:
            lasted = time.monotonic() - seen.since
            log.warning("waiting in lane %s: that is over, after %.0f s: %s", self._lane, lasted, seen.sentence)

    def _is_steady(self, kind: str, seen: _Seen, now: float) -> bool:
        if kind == "redis":
            return True
        if kind.startswith("workers") and now - self._away < BACK:
            return False
        return now - seen.since >= (STEADY_LONG if kind in SLOW else STEADY)
