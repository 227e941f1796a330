"""For tests without an event loop: waiting for what other processes do, and finding those by a length of sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something to become true. Raises AssertionError when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def sleepers(seconds: str) -> list[psutil.Process]:
    """Living processes `sleep SECONDS`: with a number of one test's own these are that test's."""
    living = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", seconds]:
                living.append(process)
    return living
