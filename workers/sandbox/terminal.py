"""The reading end of a shell's terminal: bounded memory whatever is printed, and no long turn of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re

HALF = 16_000
"""Bytes kept of the head and of the tail of a command's output."""

FLOOD = 4 << 20
"""Bytes of one command's output from which on it is read in portions, so that it can't keep the event loop busy."""

LAST_WORDS = 0.05
"""Seconds in which the output of a shell that has ended is still read."""

_READ = 1 << 16
_MARK_SIZE = 64


class Terminal:
    """Reads the PTY as the event loop finds data there; keeps the head and the tail of it, and sees the mark."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd = fd
        self._shell = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._pending = bytearray()
        self._head, self._tail = bytearray(), bytearray()
        self._cut = 0
        self._seen = 0
        self._mark: re.Pattern[bytes] | None = None
        self._found: int | None = None
        self._news = asyncio.Event()
        self._open = True
        self.ended = False
        self._loop.add_reader(fd, self._read)
        self._loop.add_reader(self._shell, self._shell_ended)

    def expect(self, mark: str) -> None:
        self._mark = re.compile(rb"\x01" + mark.encode() + rb":(\d+)\x02")
        self._found = None
        self._seen = 0
        self._news.clear()

    async def wait(self, timeout: float) -> int | None:
        """The code beside the expected mark; None when `timeout` seconds are over or the terminal was closed."""
        if self.ended:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()
        return self._found

    def take(self) -> str:
        """What was read since the last time, without one last newline; the middle of much output is left out."""
        self._keep(bytes(self._pending))
        self._pending.clear()
        text = self._head.decode("utf-8", "replace")
        if self._cut:
            text += f"\n[{self._cut} bytes left out]\n"
        text += self._tail.decode("utf-8", "replace")
        self._head.clear()
        self._tail.clear()
        self._cut = 0
        return text.removesuffix("\n")

    def stop(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._shell)
            os.close(self._shell)

    def _read(self) -> None:
        data = b""
        try:
            while len(data) < _READ:  # the terminal gives 4 KB at a time
                data += os.read(self._fd, _READ)
        except BlockingIOError:
            if not data:
                return
        except OSError:  # EIO: the last process that had the terminal open is gone
            if not data:
                self._over()
                return
        self._seen += len(data)
        self._pending += data
        self._look()
        if self._seen > FLOOD and self._open:
            self._loop.remove_reader(self._fd)
            self._loop.call_later(0.002, self._again)

    def _shell_ended(self) -> None:
        """Bash is gone. Its jobs may hold the terminal open, so the end of file need not come; its last words do."""
        self._loop.remove_reader(self._shell)
        self._loop.call_later(LAST_WORDS, self._over)

    def _over(self) -> None:
        self.ended = True
        self.stop()
        self._news.set()

    def _again(self) -> None:
        if self._open:
            self._loop.add_reader(self._fd, self._read)

    def _look(self) -> None:
        found = self._mark.search(self._pending) if self._mark else None
        if found is not None:
            self._found = int(found[1])
            del self._pending[found.start() : found.end()]
            self._mark = None
            self._news.set()
        elif len(self._pending) > _MARK_SIZE:
            self._keep(bytes(self._pending[:-_MARK_SIZE]))
            del self._pending[:-_MARK_SIZE]

    def _keep(self, data: bytes) -> None:
        room = HALF - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > HALF:
            over = len(self._tail) - HALF
            self._cut += over
            del self._tail[:over]
