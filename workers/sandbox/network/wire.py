"""One connection of the proxy: asyncio's streams below, h11's events above."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11

CHUNK = 65_536


@dataclass
class Traffic:
    """Bytes towards the world and back."""

    sent: int = 0
    received: int = 0


class Wire:
    """Reads and writes events or plain bytes. `moved` is called for each piece that came or went."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        role: Any,
        head_bytes: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.moved: Callable[[], None] = lambda: None
        self.bodiless = False
        """Whether the last request wants no body in its answer (HEAD)."""
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(role, max_incomplete_event_size=head_bytes)
        self._traffic = traffic or Traffic()
        # Drain then waits until all is with the kernel, so that an abort afterwards cuts nothing off.
        writer.transport.set_write_buffer_limits(0)

    @property
    def answered(self) -> bool:
        """Whether a response has begun (or can't begin any more)."""
        return self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    async def event(self) -> Any:
        """The next event; EndOfMessage and ConnectionClosed among them. Raises ProtocolError, OSError, EOFError."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            data = await self.read()
            if not data and self._http.their_state is h11.SEND_RESPONSE:
                raise EOFError("it closed the connection without an answer")
            self._http.receive_data(data)
        if isinstance(event, h11.Request):
            self.bodiless = event.method == b"HEAD"
        return event

    async def send(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            await self.write(data)

    async def read(self) -> bytes:
        data = await self._reader.read(CHUNK)
        self._traffic.received += len(data)
        self.moved()
        return data

    async def write(self, data: bytes) -> None:
        self._traffic.sent += len(data)
        self._writer.write(data)
        await self._writer.drain()
        self.moved()

    async def write_eof(self) -> None:
        self._writer.write_eof()

    def left_over(self) -> bytes:
        """What came behind the head of a CONNECT: the tunnel's first bytes."""
        return self._http.trailing_data[0]

    def next_cycle(self) -> bool:
        """Get ready for another request; False where this connection must end."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def linger(self) -> None:
        """Close our side, and take what still comes: an end with unread bytes would take the answer back."""
        self._writer.write_eof()
        while await self._reader.read(CHUNK):
            pass

    async def aclose(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()
