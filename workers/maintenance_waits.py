"""The maintenance worker between two workers of RQ: it waits for a Redis that is away, and minds signals meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from pipeline.config import Config
from pipeline.connection import check_sync, connect_sync
from pipeline.errors import RedisUnavailable


class Told:
    """SIGTERM and SIGINT while no worker of RQ minds them."""

    def __init__(self) -> None:
        self.signal = 0
        self.event = threading.Event()

    def listen(self) -> None:
        """Until the next worker puts its own handlers in the place of these."""
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.event.set()


def answers(config: Config, told: Told) -> bool:
    """Wait until Redis answers; False when told to stop. Raises RedisUnavailable after limits.outage."""
    until = time.monotonic() + config.limits.outage
    with connect_sync(config) as client:
        while not told.event.is_set():
            try:
                check_sync(client, config.redis.url)
            except RedisUnavailable as error:
                if time.monotonic() > until:
                    raise RedisUnavailable(f"{error} (for limits.outage = {config.limits.outage:g} s)") from None
                told.event.wait(1.0)
            else:
                return True
    return False
