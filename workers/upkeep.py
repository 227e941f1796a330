"""The heartbeat thread of a worker: beats, ticks, doorbell, and a look at the event loop.

It has a connection of its own and goes on whatever the event loop does, while the process lives. (A C call that holds
the GIL stops it too; model text is therefore matched in a child or by linear patterns.)
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError

from pipeline import address_file
from pipeline.leases import read_beat, read_tick
from pipeline.queue import Queue
from pipeline.queue_calls import AWAY, refuses_for_now
from pipeline.scripts import run_script

log = logging.getLogger(__name__)

Held = list[tuple[str, str, str]]


class Upkeep(threading.Thread):
    """Runs until `stop`. Callbacks are called in this thread: they must only hand over to the event loop.

    `held`: the leases to renew, (stage, id, token). `on_beat`: told per lease: 1 (held), 0 (lost), a cancel's reason.
    `about`: what the worker says of itself. `kill`: called right before the process ends itself (`loop_dead`).
    `on_down`: Redis is away because the line was taken down; called again as long as that is so.
    """

    def __init__(
        self,
        client: redis.Redis,
        queue: Queue,
        worker: str,
        *,
        held: Callable[[], Held],
        on_beat: Callable[[Held, list[str | int]], None],
        about: Callable[[], dict[str, Any]],
        kill: Callable[[], None] = lambda: None,
        on_down: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"upkeep-{worker}", daemon=True)
        self._client = client
        self._queue = queue
        self._config = queue.config
        self._worker = worker
        self._held, self._on_beat, self._about, self._kill, self._on_down = held, on_beat, about, kill, on_down
        self._address = address_file.file_of(self._config)
        self._ending = threading.Event()
        self._away_total = 0.0
        self._away_since: float | None = None
        self._last_beat = 0.0
        self._last_tick = 0.0
        self._reported = self._said_old = False
        self._told = (False, False)
        self._loop_thread = threading.get_ident()
        self.pulse = time.monotonic()
        self.stalled = False
        self.memory_high = False

    def away(self) -> float:
        """Seconds that Redis has been away since this worker started (monotonic total)."""
        since = self._away_since
        return self._away_total + (time.monotonic() - since if since is not None else 0.0)

    def stop(self) -> None:
        """End the thread; it strikes the worker off the list. `join` waits for it, a second at most."""
        self._ending.set()

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                self._turn()
        except BaseException:  # without this thread every lease of a process that seems well would run out
            log.critical("upkeep ended by a fault of its own: this process ends with it", exc_info=True)
            self._end_process()
        try:
            self._client.zrem(self._queue.key("beats"), self._worker)
            self._client.hdel(self._queue.key("workers"), self._worker)
        except RedisError as error:
            log.info("the worker can't be struck off the list (%s); it drops off after an hour", error)
        self._client.close()

    def _turn(self) -> None:
        """Wait for the doorbell or the next beat or tick, whichever comes first, and do what is due."""
        self._look_at_loop()
        try:
            rung = self._client.blpop([self._queue.key("bell", "worker", self._worker)], timeout=self._wait())
            self._once(rung is not None)
            self._is_back()
        except AWAY as error:
            self._is_away(error)
            self._ending.wait(min(0.5, self._config.lease.tick))
        except RedisError as error:
            if not (isinstance(error, ResponseError) and refuses_for_now(error)):
                log.exception("upkeep failed and is tried again in a second")
            self._is_away(error)
            self._ending.wait(1.0)

    def _wait(self) -> float:
        """Seconds until the next beat or tick is due; the doorbell is waited for that long."""
        now = time.monotonic()
        due = min(self._last_beat + self._config.lease.beat, self._last_tick + self._config.lease.tick)
        return min(max(due - now, 0.01), 1.0)

    def _once(self, rung: bool) -> None:
        now = time.monotonic()
        back = self._away_since is not None
        if rung or back or now - self._last_beat >= self._config.lease.beat:
            self.beat()
            self._last_beat = now
        if now - self._last_tick >= self._config.lease.tick:
            if self._is_news():
                self.beat()
                self._last_beat = now
            arguments = self._queue.tick_arguments(self._worker)
            ticked = read_tick(run_script(self._client, "tick", self._queue.prefix, arguments))
            self._last_tick = now
            self._hear(ticked.schema)
            if ticked.expired or ticked.failed:
                log.warning(
                    "%d leases of silent workers ran out: given out again, but for %d that ended as failed",
                    ticked.expired, ticked.failed,
                )  # fmt: skip
            self._look_at_memory()

    def _is_news(self) -> bool:
        """Whether this worker would say something else of itself that a waiting trainer should hear of at once."""
        about = self._about()
        return (bool(about.get("paused")), bool(about.get("stopping"))) != self._told

    def beat(self) -> None:
        """Renew every lease; in pages, so that a thousand leases do not hold Redis."""
        held = self._held()
        for at in range(0, max(len(held), 1), 500):
            page = held[at : at + 500]
            about = self._about()
            self._told = (bool(about.get("paused")), bool(about.get("stopping")))
            arguments = self._queue.beat_arguments(self._worker, about, page)
            reply = run_script(self._client, "beat", self._queue.prefix, arguments)
            beaten = read_beat(reply)
            self._hear(beaten.schema)
            self._on_beat(page, beaten.held)

    def _hear(self, schema: int) -> None:
        """The line's schema, with each beat and tick: above what this version reads, the loop claims nothing more."""
        self._queue.hear_schema(schema)
        if self._queue.outdated and not self._said_old:
            self._said_old = True
            log.error("%s. What is in work is finished, then this worker ends", self._queue.too_old())

    def _look_at_memory(self) -> None:
        try:
            info: Any = self._client.info("memory")
        except ResponseError:
            return
        limit = int(info.get("maxmemory", 0))
        high = limit > 0 and int(info["used_memory"]) > self._config.memory.high * limit
        if high and not self.memory_high:
            log.warning(
                "Redis is above the memory mark (memory.high = %s): INIT claims nothing more", self._config.memory.high
            )
        self.memory_high = high

    def _is_away(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning(
                "Redis does not answer (%s): running rollouts go on, nothing is claimed, writes are repeated", error
            )
        if self._address is not None and address_file.is_down(self._address):
            self._on_down()

    def _is_back(self) -> None:
        if self._away_since is not None:
            gone = time.monotonic() - self._away_since
            self._away_total += gone
            self._away_since = None
            log.warning("Redis answers again after %.1f s", gone)

    def _look_at_loop(self) -> None:
        silent = time.monotonic() - self.pulse
        limits = self._config.limits
        if silent < limits.loop_stall:
            self.stalled = self._reported = False
            return
        self.stalled = True
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)[-6:]) if frame else "(no stack)"
        if not self._reported:
            self._reported = True
            log.error(
                "the event loop has not turned for %.0f s; nothing more is claimed; it is held by:\n%s", silent, stack
            )
        if silent >= limits.loop_dead:
            log.critical(
                "the event loop has not turned for %.0f s: this process ends, its rollouts are given out again", silent
            )
            self._end_process()

    def _end_process(self) -> None:
        self._kill()
        logging.shutdown()
        os._exit(1)
