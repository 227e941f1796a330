"""Where the processes of one job leave notes for each other: in the line's Redis, in files of a shared folder, or both.

Notes are small maps (JSON). A place that does not answer is left out and said: as long as one works, they meet.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from redis.exceptions import RedisError

from pipeline.errors import LineError
from pipeline.queue import Queue
from pipeline.whole_file import write_whole

T = TypeVar("T")
Note = dict[str, Any]

LIFE_SECONDS = 900
"""Notes in Redis end by themselves, where nobody takes them away."""

FILE_SECONDS = 10.0
"""A file system that hangs longer than this counts as not there."""


class Place(Protocol):
    """One place for notes. Its methods raise LineError, RedisError, OSError, TimeoutError when it does not answer."""

    name: str

    async def put(self, name: str, note: Note) -> None: ...

    async def notes(self) -> dict[str, Note]: ...

    async def clear(self) -> None: ...


class InRedis:
    """A hash of the line, `doctor:RUN`."""

    def __init__(self, queue: Queue, run: str) -> None:
        self.name = "Redis"
        self._queue, self._key = queue, queue.key("doctor", run)

    async def put(self, name: str, note: Note) -> None:
        await self._queue.execute("HSET", self._key, name, json.dumps(note))
        await self._queue.execute("EXPIRE", self._key, LIFE_SECONDS)

    async def notes(self) -> dict[str, Note]:
        found = await self._queue.execute("HGETALL", self._key)
        return {name.decode(): json.loads(text) for name, text in found.items()}

    async def clear(self) -> None:
        await self._queue.execute("DEL", self._key)


class InFolder:
    """A folder `doctor-RUN` in a shared one, a file a note; each appears whole."""

    def __init__(self, folder: Path, run: str) -> None:
        self.name = str(folder)
        self.path = folder / f"doctor-{run}"

    async def put(self, name: str, note: Note) -> None:
        await self.write(f"{name}.json", json.dumps(note))

    async def write(self, name: str, text: str) -> None:
        """A file of this folder, which others see whole. Raises OSError, TimeoutError."""

        def work() -> None:
            self.path.mkdir(mode=0o700, exist_ok=True)
            write_whole(self.path / name, text)

        await beside(work, FILE_SECONDS)

    async def notes(self) -> dict[str, Note]:
        return await beside(self._read, FILE_SECONDS)

    def _read(self) -> dict[str, Note]:
        if not self.path.is_dir():
            return {}
        return {file.stem: json.loads(file.read_text("utf-8")) for file in self.path.glob("*.json")}

    async def clear(self) -> None:
        await beside(lambda: shutil.rmtree(self.path, ignore_errors=True), FILE_SECONDS)


class Meeting:
    """Several places as one. `silent`: why a place was left out, by its name."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.silent: dict[str, str] = {}

    async def put(self, name: str, note: Note) -> None:
        await self._each(lambda place: place.put(name, note))

    async def notes(self) -> dict[str, Note]:
        """All notes of all places together."""
        found: dict[str, Note] = {}
        for notes in await self._each(lambda place: place.notes()):
            found |= notes
        return found

    async def clear(self) -> None:
        await self._each(lambda place: place.clear())

    async def _each(self, call: Callable[[Place], Any]) -> list[Any]:
        found = await asyncio.gather(*(self._try(place, call) for place in list(self.places)))
        return [item for item in found if item is not None]

    async def _try(self, place: Place, call: Callable[[Place], Any]) -> Any:
        try:
            return await call(place)
        except (LineError, RedisError, OSError, TimeoutError, ValueError) as error:
            if place in self.places:
                self.places.remove(place)
            self.silent[place.name] = str(error) or f"it does not answer within {FILE_SECONDS:g} s"
            return None


async def beside(function: Callable[[], T], seconds: float) -> T:
    """Run what may hang (a file system that is away) in a thread that holds up neither the loop nor the process's end.

    Raises TimeoutError, and whatever `function` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[], None]) -> None:
        if not done.done():
            set_it()

    def work() -> None:
        try:
            found = function()
        except BaseException as error:  # handed to whoever waits
            wrong = error
            told: Callable[[], None] = lambda: done.set_exception(wrong)  # noqa: E731 - one of two, named for `tell`
        else:
            told = lambda: done.set_result(found)  # noqa: E731
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, told)

    threading.Thread(target=work, daemon=True, name="beside").start()
    return await asyncio.wait_for(done, seconds)
