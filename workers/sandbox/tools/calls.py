"""One call at a time, each ended properly: a caller that is cancelled leaves at once, its call ends behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Calls:
    """The calls of one tool. `hurry` is called when the running one should end what it waits for."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry
        self._lock = asyncio.Lock()
        self._current: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
        """Do `work` when its turn comes. The event that it gets is set when nobody waits for its result any more."""
        given_up = asyncio.Event()
        task = asyncio.create_task(self._one(work, given_up))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._give_up(given_up)
            raise

    async def after(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the running call end what it does, then do `work`."""
        if self._current is not None:
            self._give_up(self._current)
        async with self._lock:
            return await work

    async def _one(self, work: Callable[[asyncio.Event], Coroutine[Any, Any, T]], given_up: asyncio.Event) -> T:
        async with self._lock:
            if given_up.is_set():
                raise asyncio.CancelledError
            self._current = given_up
            try:
                return await work(given_up)
            finally:
                self._current = None

    def _give_up(self, given_up: asyncio.Event) -> None:
        given_up.set()
        if self._current is given_up:
            self._hurry()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who called hears of it; after a cancel nobody does
