"""Payloads and tasks, in Redis or in files: where a write goes, how a read finds it, who removes what is over.

A script that removes a key puts its file into the line's trash (`forget` in lua/prelude.lua), and a worker removes it
some seconds later: a Redis whose machine dies may come back as it was a second ago, and must find what it then names.
What a crash leaves in between, and what expires by itself, the sweep removes (pipeline/payload_sweep.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

from redis.exceptions import OutOfMemoryError

from pipeline.errors import ConfigError, EnvelopeError, MemoryHigh, PayloadFilesAway, RedisUnavailable
from pipeline.payload_files import FULL, THREADS, PayloadFiles, Reference, reference_in
from pipeline.queue_calls import QueueCalls

log = logging.getLogger(__name__)

SEEN = 10.0
"""Seconds for which a file is looked for that its key names: a network file system shows a new one a little later."""
FRESH = 600.0
"""Seconds in which a file's key must follow it; else it is written again, for the sweep takes it for left over."""
OLD = 3600.0
"""Seconds, beside limits.outage, after which a file that no key names is left over."""
KEPT = 10.0
"""Seconds for which a file outlives its key: longer than what `appendfsync everysec` can lose."""
EVERY = 2.0
"""Seconds between two looks of a worker into the trash."""
PAGE = 500
"""Files that one look takes."""
ANEW = 0.5
"""Seconds between two tries to write where neither the folder nor Redis has room."""
SAID = 60.0
"""Seconds between two warnings that the folder takes no payload."""


class Home(NamedTuple):
    """The line's folder: its name under payload.dir, and what that is called where the line's first writer runs."""

    name: str
    folder: str
    host: str


class PayloadVerbs(QueueCalls):
    """Reads and writes of payloads and tasks. Raises as QueueCalls does, and PayloadFilesAway where a file is out of
    reach of this machine: no fault of the rollout's."""

    _home_known = ""
    _said_full = float("-inf")

    @cached_property
    def files(self) -> PayloadFiles:
        return PayloadFiles(self.config)

    def rides(self, data: bytes) -> bool:
        """Whether a payload is so small that it travels with the commit."""
        payload = self.config.payload
        return len(data) <= (min(payload.inline_bytes, payload.inline_max) if self.files.on else payload.inline_bytes)

    # -- read --------------------------------------------------------------------------------------------------------

    async def read_payload(self, id: str, token: str, seen: bytes = b"") -> bytes | None:
        """The payload under this token, None when it is not there. `seen`: what the claim brought of its key.

        Raises EnvelopeError: its file is gone, short or changed.
        """
        return await self._read(self.key("p", id, token), seen)

    async def read_task(self, group: str, seen: bytes = b"") -> bytes | None:
        """As `read_payload`, the task of a group."""
        return await self._read(self.key("t", group), seen)

    async def _read(self, key: str, seen: bytes) -> bytes | None:
        until, wait = time.monotonic() + SEEN, 0.02
        data = seen or await self.execute("GET", key)
        while data is not None:
            reference = reference_in(data)
            if reference is None:
                return bytes(data)
            try:
                return await self.files.run(self.files.read, reference)
            except OSError as error:
                if time.monotonic() + wait > until:
                    raise await self.files.run(self.files.why, reference, error) from error
            await asyncio.sleep(wait)
            wait = min(wait * 1.6, 1.0)
            data = await self.execute("GET", key)  # it may have been replaced or acknowledged meanwhile
        return None

    # -- write -------------------------------------------------------------------------------------------------------

    def _in_file(self, data: bytes) -> bool:
        return self.files.on and self.schema >= 2 and len(data) > self.files.most

    async def write_payload(self, id: str, token: str, data: bytes, life: float) -> None:
        """Write a payload under its token; it expires after `life` seconds unless a commit makes it stay.

        Where the folder of the files has no room, or fails, it goes to Redis, as long as that is below memory.high;
        a refusal of both is repeated for ever: a finished rollout is never thrown away for want of room.
        """
        key, apart = self.key("p", id, token), self._in_file(data)
        reference: Reference | None = None
        written = float("-inf")
        while True:
            try:
                if apart and (reference is None or time.monotonic() - written > FRESH):
                    written, reference = time.monotonic(), await self._lay(f"p:{id}:{token}", data)
                if not apart or reference is not None or not await self.memory_high():
                    await self.execute("SET", key, reference.pack() if reference else data, "EX", max(1, int(life)))
                    if reference is None or time.monotonic() - written <= FRESH:
                        return
            except OutOfMemoryError:
                pass  # as with a folder that is full: once there is room
            await asyncio.sleep(ANEW)

    async def _lay(self, about: str, data: bytes) -> Reference | None:
        """Write a file; None where the folder does not take it."""
        try:
            return await self._write_file(about, data)
        except (OSError, ConfigError) as error:
            if time.monotonic() - self._said_full > SAID:
                self._said_full = time.monotonic()
                log.warning(
                    "payload.dir (%s) takes no payload: %s. Large payloads go to Redis instead, up to memory.high "
                    "(said once a minute)", self.files.root, getattr(error, "strerror", None) or error,
                )  # fmt: skip
            return None

    async def _write_file(self, about: str, data: bytes) -> Reference:
        """Raises OSError, and OutOfMemoryError where Redis can't take the name of the line's folder."""
        return await self.files.run(self.files.write, (await self._home()).name, about, data)

    async def lay_task(self, group: str, task: bytes) -> bytes:
        """What the key of this task is to hold: the task itself, or the reference of the file in which it now lies.

        Raises MemoryHigh when the folder is full, PayloadFilesAway when it fails otherwise: new work can wait.
        """
        if not self._in_file(task):
            return task
        try:
            return (await self._write_file(f"t:{group}", task)).pack()
        except OSError as error:
            place = f"payload.dir ({self.files.root})"
            if error.errno in FULL:
                raise MemoryHigh(
                    f"{place} is full ({error.strerror}): task {group} was not enqueued. Pop what is done, or make room"
                ) from error
            raise PayloadFilesAway(
                f"{place} does not take task {group} ({error.strerror or error}): it was not enqueued. `rollout "
                "doctor` looks"
            ) from error
        except OutOfMemoryError as error:
            raise MemoryHigh(f"Redis is full ({error}); task {group} was not enqueued. Pop what is done") from error

    async def settle_task(self, group: str, held: bytes) -> None:
        """After an enqueue: the file goes that its key does not name, for it was refused, or the group had its task."""
        if reference_in(held) and await self.execute("GET", self.key("t", group)) != held:
            await self._remove([held])

    # -- remove ------------------------------------------------------------------------------------------------------

    async def remove_due(self, kept: float = KEPT) -> int:
        """Remove the files whose keys went `kept` seconds ago or earlier; how many. 0 without payload.dir."""
        removed = 0
        while self.files.on:
            page = await self.verb("trash", int(kept * 1000), PAGE)
            removed += await self._remove(page)
            if len(page) < PAGE:
                break
        return removed

    async def keep_removing(self) -> None:
        """The task of a worker that removes what is due, until it is cancelled."""
        while self.files.on:
            await asyncio.sleep(EVERY)
            try:
                await self.remove_due()
            except RedisUnavailable as error:
                log.info("%s; the trash waits", error)
            except Exception:
                log.exception("payload files could not be removed; this is tried again in %g s", EVERY)

    async def _remove(self, references: Iterable[bytes]) -> int:
        paths: list[str] = []
        for data in references:
            with contextlib.suppress(EnvelopeError):  # a damaged one names nothing: the sweep finds its file
                paths += [reference.path for reference in [reference_in(bytes(data))] if reference]
        pages = [paths[at::THREADS] for at in range(min(THREADS, len(paths)))]
        return sum(await asyncio.gather(*(self.files.run(self.files.remove, page) for page in pages)))

    # -- the line's folder -------------------------------------------------------------------------------------------

    async def home(self) -> Home | None:
        """The line's folder, None while it has none."""
        told = await self.execute("GET", self.key("files"))
        if told is None:
            return None
        about: dict[str, Any] = json.loads(told)
        self._home_known = about["home"]
        return Home(about["home"], about["folder"], about["host"])

    async def _home(self) -> Home:
        """The line's folder; the first who asks makes it. After a loss of Redis's data it is the one known before.

        Raises OSError, ConfigError, and OutOfMemoryError when Redis is full.
        """
        found = await self.home()
        if found is not None:
            return found
        name, fresh = self._home_known, not self._home_known
        if fresh:
            name = f"{self.config.line.name}-{os.urandom(6).hex()}"
            await self.files.run(self.files.make_home, name)
        about = json.dumps({"home": name, "folder": str(self.files.root), "host": socket.gethostname()})
        await self.execute("SET", self.key("files"), about, "NX")
        found = await self.home()
        if found is None:
            raise ConfigError("the key `files` went as it was written: does somebody empty this Redis?")
        if fresh and found.name != name:
            await self.files.run(self.files.remove_home, name)
        return found

    async def check_files(self, *, make: bool = True) -> None:
        """Raises ConfigError unless this machine can read and write the line's payload files, where it has some.

        `make`: the line's folder is made where it has none, so that whoever starts later is measured by it.
        """
        found = await self.home()
        if not self.files.on:
            if found is not None:
                raise ConfigError(
                    f"line {self.config.line.name!r} keeps large payloads in files in {found.folder} (so says "
                    f"{found.host}), and payload.dir is not set here: set it to that file system's folder"
                )
            return
        await self.files.run(self.files.check)
        if make and self.schema >= 2:
            with contextlib.suppress(OutOfMemoryError, OSError):  # a full server or folder: made when there is room
                found = await self._home()
        if found is not None and not await self._sees(found):
            raise ConfigError(
                f"payload.dir is {self.files.root}, and the line's folder {found.name} is not in it: {found.host} made "
                f"it in {found.folder}. Is that the same file system? Where the folder was removed, its payloads are "
                "lost: make it again (mkdir), and each will be reported"
            )

    async def _sees(self, home: Home) -> bool:
        until, wait = time.monotonic() + SEEN, 0.05
        while not await self.files.run(self.files.has_home, home.name):
            if time.monotonic() + wait > until:
                return False
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)
        return True
