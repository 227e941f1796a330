"""The trainer's client without asyncio: a thin wrapper that runs the asyncio one on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, Self, TypeVar

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.results import Batch, Group, Rollout

T = TypeVar("T")


class SyncRolloutClient:
    """`RolloutClient` for plain code: the same methods, blocking. Use it as a context manager, or call `close`."""

    def __init__(self, url: str | None = None, *, config: Config | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        try:
            self._client = RolloutClient(url, config=config)
            self._run(self._client.open())
        except BaseException:
            self._end()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this client is closed: make a new SyncRolloutClient")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is popped and not acked, and disconnect. Safe twice."""
        if self._loop.is_running():
            self._run(self._client.close())
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def enqueue(
        self, tasks: Iterable[Task], *, samples: int = 1, priority: int = 0, lane: str = "train", wait: float = 0.0
    ) -> list[str]:
        return self._run(self._client.enqueue(tasks, samples=samples, priority=priority, lane=lane, wait=wait))

    def pop(self, n: int, timeout: float | None = None, lane: str = "train") -> Batch:
        return self._run(self._client.pop(n, timeout, lane))

    def pop_groups(self, n: int, timeout: float | None = None, lane: str = "train") -> list[Group]:
        return self._run(self._client.pop_groups(n, timeout, lane))

    def ack(self, popped: Batch | Group | Iterable[Group | Rollout] | Rollout) -> None:
        self._run(self._client.ack(popped))

    def cancel(self, ids: Iterable[str], why: str = "cancelled by the trainer") -> dict[str, str]:
        return self._run(self._client.cancel(ids, why))

    def status(self) -> dict[str, Any]:
        return self._run(self._client.status())
