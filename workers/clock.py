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
        self._worked = 0.0
        self._since = time.monotonic()
        self._away_before = away()
        self._pauses = 0
        self.why = ""

    @contextmanager
    def paused(self, why: str) -> Iterator[None]:
        """Working time stands still inside; pauses may overlap (several calls of one rollout, Redis away too)."""
        if self._pauses == 0:
            self._worked += self._stretch()
            self.why = why
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._since, self._away_before = time.monotonic(), self._away()
                self.why = ""

    def _stretch(self) -> float:
        """Seconds of work since the last pause; what Redis was away in a pause is the pause's alone."""
        return max(0.0, time.monotonic() - self._since - (self._away() - self._away_before))

    @property
    def elapsed(self) -> float:
        """Seconds worked."""
        return self._worked + (0.0 if self._pauses else self._stretch())

    @property
    def remaining(self) -> float:
        """Seconds left; below zero when the limit is over."""
        return self.limit - self.elapsed
