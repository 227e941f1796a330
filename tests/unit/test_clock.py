"""Working time stands still while the policy is paused and while Redis is away. Time is a number here."""

from __future__ import annotations

import pytest

from workers import clock
from workers.clock import WorkingClock


class Time:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    stopped = Time()
    monkeypatch.setattr(clock, "time", stopped)
    return stopped


def test_it_counts(time: Time) -> None:
    watch = WorkingClock(10.0)
    time.now += 4
    assert (watch.elapsed, watch.remaining) == (4.0, 6.0)
    time.now += 8
    assert watch.remaining == -2.0


def test_a_pause_does_not_count(time: Time) -> None:
    watch = WorkingClock(10.0)
    time.now += 1
    with watch.paused("the policy is being updated"):
        time.now += 100
        assert (watch.elapsed, watch.why) == (1.0, "the policy is being updated")
    time.now += 1
    assert (watch.elapsed, watch.why) == (2.0, "")


def test_pauses_that_overlap_count_once(time: Time) -> None:
    watch = WorkingClock(10.0)
    with watch.paused("a"):
        time.now += 3
        with watch.paused("b"):
            time.now += 3
        time.now += 3
        assert watch.elapsed == 0.0
    time.now += 2
    assert watch.elapsed == 2.0


def test_a_pause_that_raises_ends(time: Time) -> None:
    watch = WorkingClock(10.0)
    with pytest.raises(KeyError), watch.paused("a"):
        time.now += 3
        raise KeyError("x")
    time.now += 1
    assert watch.elapsed == 1.0


def test_while_redis_is_away_no_time_passes(time: Time) -> None:
    away = 50.0
    watch = WorkingClock(10.0, lambda: away)
    time.now += 5
    away += 4
    assert watch.elapsed == 1.0, "and what was away before it began is nothing to it"


def test_what_redis_is_away_in_a_pause_is_taken_off_once(time: Time) -> None:
    away = 0.0
    watch = WorkingClock(10.0, lambda: away)
    time.now += 2
    with watch.paused("a"):
        time.now += 5
        away += 4
    time.now += 3
    away += 1
    assert watch.elapsed == 4.0


def test_it_never_runs_backwards(time: Time) -> None:
    away = 0.0
    watch = WorkingClock(10.0, lambda: away)
    with watch.paused("a"):
        time.now += 5
        away += 5
    assert watch.elapsed == 0.0
