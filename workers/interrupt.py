"""Runs a coroutine so that Ctrl-C always ends it.

On Python 3.11 `asyncio.wait_for` may swallow a cancel that comes in the very moment in which its work ends, and
redis-py uses it for each command that it sends. `asyncio.run` cancels once; here it is done again until the coroutine
has ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN = 1.0
"""Seconds between two cancels: long enough for what a cancelled coroutine still has to put in order."""


class Interrupted(BaseException):
    """A signal ended it; `number` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(work: Coroutine[Any, Any, T], signals: Sequence[int] = (signal.SIGINT,)) -> T:
    """The coroutine's result. Raises KeyboardInterrupt for SIGINT, Interrupted for another of `signals`."""
    before = {number: signal.getsignal(number) for number in signals}
    seen: list[int] = []
    try:
        return asyncio.run(_guarded(work, signals, seen))
    except asyncio.CancelledError:
        if seen and seen[0] != signal.SIGINT:
            raise Interrupted(seen[0]) from None
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _guarded(work: Coroutine[Any, Any, T], signals: Sequence[int], seen: list[int]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def stop(number: int) -> None:
        seen.append(number)
        if not task.done():
            task.cancel()
            loop.call_later(AGAIN, stop, number)

    for number in signals:
        loop.add_signal_handler(number, stop, number)
    await asyncio.wait({task})
    if seen and not task.cancelled() and task.exception() is not None:
        raise asyncio.CancelledError  # the error is what the cancel made of it
    return await task
