"""The trainer's client without asyncio: a thin wrapper that runs the asyncio one on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Self, TypeVar

from pipeline.backends import Backend, View
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.feed import Tasks
from pipeline.groups import GroupPolicy
from pipeline.refusals import StreamStats
from pipeline.report import Report
from pipeline.results import Batch, Group, Rollout
from pipeline.stream import Stream
from pipeline.weights import Mode, Move, Update

T = TypeVar("T")
PlainMove = Callable[[tuple[Backend, ...]], object]
"""Moves the weights to these servers, which are paused. It is called on the caller's own thread."""


Run = Callable[[Coroutine[Any, Any, Any]], Any]


class SyncStream:
    """`Stream` for plain code: an iterator over lists of groups, with the same methods, blocking."""

    def __init__(self, stream: Stream, run: Run) -> None:
        self._stream, self._run = stream, run

    @property
    def name(self) -> str:
        return self._stream.name

    @property
    def in_flight(self) -> int:
        return self._stream.in_flight

    @property
    def stats(self) -> StreamStats:
        return self._stream.stats

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Group]:
        batch: list[Group] | None = self._run(self._next())
        if batch is None:
            raise StopIteration
        return batch

    async def _next(self) -> list[Group] | None:
        return await anext(self._stream, None)

    def close(self) -> None:
        """What `Stream.aclose` does."""
        self._run(self._stream.aclose())

    def pause(self, why: str = "") -> None:
        self._run(self._stream.pause(why))

    def resume(self) -> None:
        self._run(self._stream.resume())

    def state_dict(self, untrained: Iterable[Group] = ()) -> dict[str, Any]:
        return self._stream.state_dict(untrained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


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
        self,
        tasks: Iterable[Task],
        *,
        samples: int = 1,
        priority: int = 0,
        lane: str = "train",
        wait: float = 0.0,
        groups: GroupPolicy | None = None,
    ) -> list[str]:
        return self._run(
            self._client.enqueue(tasks, samples=samples, priority=priority, lane=lane, wait=wait, groups=groups)
        )

    def pop(self, n: int, timeout: float | None = None, lane: str = "train") -> Batch:
        return self._run(self._client.pop(n, timeout, lane))

    def pop_groups(self, n: int, timeout: float | None = None, lane: str = "train") -> list[Group]:
        return self._run(self._client.pop_groups(n, timeout, lane))

    def ack(self, popped: Batch | Group | Iterable[Group | Rollout] | Rollout, *, drop: bool = False) -> None:
        self._run(self._client.ack(popped, drop=drop))

    def stream(self, tasks: Tasks, **about: Any) -> SyncStream:
        """`RolloutClient.stream`, with the same arguments: a plain iterator that blocks for each batch."""
        return SyncStream(self._client.stream(tasks, **about), self._run)

    def evaluate(
        self, tasks: Iterable[Task], *, samples: int = 1, timeout: float | None = None, lane: str = "eval"
    ) -> Report:
        return self._run(self._client.evaluate(tasks, samples=samples, timeout=timeout, lane=lane))

    def cancel(self, ids: Iterable[str], why: str = "cancelled by the trainer") -> dict[str, str]:
        return self._run(self._client.cancel(ids, why))

    def pause_run(self, why: str = "", lane: str = "train") -> None:
        self._run(self._client.pause_run(why, lane))

    def resume_run(self, lane: str = "train") -> None:
        self._run(self._client.resume_run(lane))

    def end_run(self) -> bool:
        return self._run(self._client.end_run())

    def status(self) -> dict[str, Any]:
        return self._run(self._client.status())

    def start_run(
        self,
        version: int,
        *,
        path: str | os.PathLike[str] = "",
        move: PlainMove | None = None,
        mode: Mode = "keep",
        batch: int = 0,
        max_staleness: int | None = None,
        lane: str = "train",
    ) -> Update:
        return self._run_moving(
            move,
            lambda moved: self._client.start_run(
                version, path=path, move=moved, mode=mode, batch=batch, max_staleness=max_staleness, lane=lane
            ),
        )

    def update_weights(
        self, version: int, *, path: str | os.PathLike[str] = "", move: PlainMove | None = None, mode: Mode = "keep"
    ) -> Update:
        return self._run_moving(
            move, lambda moved: self._client.update_weights(version, path=path, move=moved, mode=mode)
        )

    def pause(self, mode: Mode = "keep") -> tuple[Backend, ...]:
        return self._run(self._client.pause(mode))

    def resume(self, version: int | None = None) -> Update:
        return self._run(self._client.resume(version))

    def register_backend(
        self,
        url: str,
        kind: str = "vllm",
        *,
        id: str = "",
        model: str = "",
        tokenizer: str = "",
        version: int | None = None,
    ) -> str:
        return self._run(
            self._client.register_backend(url, kind, id=id, model=model, tokenizer=tokenizer, version=version)
        )

    def policy(self) -> View:
        return self._run(self._client.policy())

    def _run_moving(self, move: PlainMove | None, work: Callable[[Move | None], Coroutine[Any, Any, T]]) -> T:
        """Run `work`; where it wants the weights moved, that happens here: devices belong to the caller's thread."""
        if move is None:
            return self._run(work(None))
        asked: queue.SimpleQueue[tuple[Backend, ...] | None] = queue.SimpleQueue()
        moved: asyncio.Future[None] = self._loop.create_future()

        async def hand_over(servers: tuple[Backend, ...]) -> None:
            asked.put(servers)
            await moved

        running = asyncio.run_coroutine_threadsafe(work(hand_over), self._loop)
        running.add_done_callback(lambda _: asked.put(None))
        try:
            servers = asked.get()
            if servers is not None:
                try:
                    move(servers)
                except Exception as error:
                    self._loop.call_soon_threadsafe(moved.set_exception, error)
                else:
                    self._loop.call_soon_threadsafe(moved.set_result, None)
            return running.result()
        except BaseException:
            running.cancel()
            raise
