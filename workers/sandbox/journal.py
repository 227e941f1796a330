"""The journal of a RUN stage: every action with the turns that led to it, and every result, kept beside the sandbox.

One file outside of what the sandbox sees. The host appends to it; after the loss of a RUN worker the next attempt reads
the turns back and asks for the same actions, which are answered from here. It needs no fsync: what loses the page cache
loses the sandbox too.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<cIQ")
"""Kind, number of the action, size of what follows."""

TURN, ACTION, RESULT = b"T", b"A", b"R"


class Journal:
    """Appends, and finds results again by their action's number."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._path = path
        self._places: dict[int, tuple[int, int]] = {}
        self._unwritten: dict[int, bytes] = {}
        self.digests: dict[int, bytes] = {}
        """Number of an action -> digest of what was asked."""
        self.turns: list[tuple[int, int]] = []
        """Place and size of each turn, in order."""

    def turn(self, data: bytes) -> None:
        self.turns.append(self._append(TURN, 0, data))

    def action(self, number: int, digest: bytes) -> None:
        self._append(ACTION, number, digest)
        self.digests[number] = digest

    def result(self, number: int, data: bytes) -> None:
        """Store it; in memory where the disk takes no more: a repeat must still not run the action again."""
        if self._fd < 0:
            return  # the stage is over, nobody asks for it
        try:
            self._places[number] = self._append(RESULT, number, data)
        except OSError as error:
            log.warning("the journal %s can't be written: %s", self._path, error)
            self._unwritten[number] = data

    def result_of(self, number: int) -> bytes | None:
        """The stored result; None while the action has none. Raises OSError."""
        if number in self._unwritten:
            return self._unwritten[number]
        place = self._places.get(number)
        return self._read(*place) if place else None

    def all_turns(self) -> list[bytes]:
        return [self._read(*place) for place in self.turns]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, kind: bytes, number: int, data: bytes) -> tuple[int, int]:
        record = _HEAD.pack(kind, number, len(data)) + data
        at = self._end
        while record:
            written = os.pwrite(self._fd, record, at)
            at += written
            record = record[written:]
        self._end = at
        return at - len(data), len(data)

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) != size:
            raise OSError(f"the journal holds {len(data)} of {size} bytes at {at}: somebody cut it")
        return data
