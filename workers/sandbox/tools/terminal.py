"""The reading end of a shell's terminal: bounded memory whatever is printed, and no long turn of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re

from workers.sandbox.tools.plain import HALF, Clip

FLOOD = 4 << 20
"""Bytes of one command's output from which on it is read in portions, so that it can't keep the event loop busy."""

LAST_WORDS = 0.05
"""Seconds in which the output of a shell that has ended is still read."""

_READ = 1 << 16
_MARK = re.compile(rb"\x01([0-9a-f]{32}):([0-9]{1,3})\x02")
_MARK_SIZE = 40


class Terminal:
    """Reads the PTY as the event loop finds data there; keeps the head and the tail of it, and sees the mark.

    `fd`: the master's side, not blocking; whoever opened it closes it after `stop`. `pid`: this process's child, whose
    end is the end of the shell. `half`: bytes kept of the head, and of the tail.
    """

    def __init__(self, fd: int, pid: int, half: int = HALF) -> None:
        self._fd = fd
        self._shell = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._pending = bytearray()
        self._clip = Clip(half)
        self._seen = 0
        self._marks: list[bytes] = []
        self._found: int | None = None
        self._news = asyncio.Event()
        self._open = True
        self.ended = False
        self._loop.add_reader(fd, self._read)
        self._loop.add_reader(self._shell, self._shell_ended)

    def expect(self, mark: str) -> None:
        """Look for `mark` (32 hexadecimal digits) from now on; late earlier ones are still taken out of the output."""
        self._marks.append(mark.encode())
        self._found = None
        self._seen = 0
        self._news.clear()

    async def wait(self, timeout: float) -> int | None:
        """The code beside the expected mark; None when `timeout` seconds are over, after `give_up`, or at the end."""
        if self.ended:
            return self._found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()
        return self._found

    def give_up(self) -> None:
        """Let the running `wait` return at once."""
        self._news.set()

    def take(self) -> str:
        """Plain text of what was read since the last time, without one last newline; the middle of much is left out."""
        self._clip.add(bytes(self._pending))
        self._pending.clear()
        return self._clip.take().removesuffix("\n")

    def stop(self) -> None:
        """Read no more. Safe twice."""
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
        if not self.ended:
            self.ended = True
            self.stop()
            self._news.set()

    def _again(self) -> None:
        if self._open:
            self._loop.add_reader(self._fd, self._read)

    def _look(self) -> None:
        begin = 0
        while found := _MARK.search(self._pending, begin):
            number, code = bytes(found[1]), int(found[2])
            begin = found.start()
            if number not in self._marks:
                begin += 1  # something printed what looks like a mark
                continue
            del self._pending[found.start() : found.end()]
            if number == self._marks[-1]:
                self._found = code
                self._marks.clear()
                self._news.set()
            else:
                self._marks.remove(number)
        if len(self._pending) > _MARK_SIZE:
            self._clip.add(bytes(self._pending[:-_MARK_SIZE]))
            del self._pending[:-_MARK_SIZE]
