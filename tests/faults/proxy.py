"""A proxy before Redis that loses replies: the command has run, and nobody is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

from pipeline import scripts

VERBS = (
    "enqueue", "claim", "beat", "commit", "fail", "tick", "cancel", "take", "hand_back", "claim_groups",
)  # fmt: skip


class LosingProxy:
    """Listens on `path`, forwards to the socket `target`.

    The first `times` replies to each verb (and to a payload's SET) are lost. `cut` closes the connection then; else it
    falls silent, and the client learns nothing until its own time-out.
    """

    def __init__(self, path: Path, target: str, *, cut: bool, times: int = 1) -> None:
        self.path = path
        self.target = target
        self.cut = cut
        self.left = Counter(dict.fromkeys((*VERBS, "payload"), times))
        self.lost: Counter[str] = Counter()
        self._marks = {scripts.sha(verb).encode(): verb for verb in VERBS}
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LosingProxy:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            server_reader, server_writer = await asyncio.open_unix_connection(self.target)
            losing = asyncio.Event()
            back = asyncio.create_task(self._back(server_reader, writer, losing))
            try:
                while data := await reader.read(1 << 16):
                    self._look(data, losing)
                    server_writer.write(data)
                    await server_writer.drain()
            finally:
                back.cancel()
                server_writer.close()
                writer.close()

    def _look(self, data: bytes, losing: asyncio.Event) -> None:
        """Does this hold a command whose reply is to be lost?"""
        seen = [verb for mark, verb in self._marks.items() if mark in data and b"EVALSHA" in data]
        if b"\r\nSET\r\n" in data and b"}:p:" in data:
            seen.append("payload")
        for verb in seen:
            if self.left[verb] > 0:
                self.left[verb] -= 1
                self.lost[verb] += 1
                losing.set()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not losing.is_set():
                    writer.write(data)
                elif self.cut:
                    break
            writer.close()
