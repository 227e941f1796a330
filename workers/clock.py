"""Working time of one attempt: it stands still while the policy is away and while Redis is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WorkingClock:
    """Counts seconds of work since it was made. `away` tells how long Redis has been away in all (monotonic total)."""

    def __init__(self, limit: float, away: Callable[[], float] = lambda: 0.0) -> None:
        self.limit = limit
        self._away = away
        self._began = time.monotonic()
        self._away_before = away()
        self._paused = 0.0
        self._pauses = 0
        self._pause_began = 0.0
        self.why = ""

    @contextmanager
    def paused(self, why: str) -> Iterator[None]:
        """Working time stands still inside; pauses may overlap (several calls of one rollout)."""
        if self._pauses == 0:
            self._pause_began = time.monotonic()
            self.why = why
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._paused += time.monotonic() - self._pause_began
                self.why = ""

    @property
    def elapsed(self) -> float:
        """Seconds worked; where Redis is away during a pause of the policy, that time is taken off twice."""
        now = time.monotonic()
        pause = now - self._pause_began if self._pauses else 0.0
        return max(0.0, now - self._began - self._paused - pause - (self._away() - self._away_before))

    @property
    def remaining(self) -> float:
        """Seconds left; below zero when the limit is over."""
        return self.limit - self.elapsed
