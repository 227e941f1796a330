"""What a kernel says about one cell, put together in order: prints, results, pictures, errors. Bounded in size."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from workers.sandbox.tools.plain import HALF, Clip

PICTURES = 20
"""Pictures of one cell that are kept."""

PICTURE_BYTES = 32 << 20
"""Bytes of all pictures of one cell that are kept."""

MESSAGE_BYTES = 32 << 20
"""A message larger than this is dropped with its connection: a kernel is the policy's, and must not fill our memory."""

IDLE_SECONDS = 1.0
"""How long after a cell's reply the rest of its output may still come."""

_BUSY = 200
"""Messages of one cell from which on the event loop gets room between portions of them."""

_AT_ONCE = 10
_REST_SECONDS = 0.002

_KINDS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/svg+xml": "svg"}


class Gathered:
    """Output of one cell.

    `folder`: where its pictures will be, as seen inside; `label` begins their names; `half`: bytes kept of each end.
    """

    def __init__(self, folder: str, label: str, half: int = HALF) -> None:
        self._where = f"{folder}/{label}"
        self._clip = Clip(half)
        self._at_line_start = True
        self.error = ""
        self.leaves = False
        """Whether the cell asked the kernel to end: exit()."""
        self.pictures: dict[str, bytes] = {}
        self._room = PICTURE_BYTES

    def take(self) -> str:
        """The text, without one last newline."""
        return self._clip.take().removesuffix("\n")

    def reply(self, content: dict[str, Any]) -> None:
        """The kernel's answer to the cell, where it says what the broadcast may have left out."""
        if content.get("status") == "error" and not self.error:
            self.add("error", content)
        payload = content.get("payload")
        if isinstance(payload, list):
            self.leaves = any(isinstance(item, dict) and item.get("source") == "ask_exit" for item in payload)

    def add(self, kind: str, content: dict[str, Any]) -> bool:
        """One message of the kernel's broadcast channel; True when it says that the cell is over."""
        if kind == "status":
            return content.get("execution_state") == "idle"
        if kind == "stream":
            self._print(str(content.get("text", "")))
        elif kind in ("execute_result", "display_data", "update_display_data"):
            self._show(dict(content.get("data", {})))
        elif kind == "error":
            self.error = str(content.get("ename", "")) or "Exception"
            trace = [str(line) for line in content.get("traceback", [])]
            said = "\n".join(trace).rstrip("\n")
            self._line(said or f"{self.error}: {content.get('evalue', '')}")
        return False

    def _show(self, data: dict[str, Any]) -> None:
        for mime, ending in _KINDS.items():
            picture = _picture(mime, data[mime]) if mime in data and len(self.pictures) < PICTURES else None
            if picture is not None and len(picture) <= self._room:
                self._room -= len(picture)
                path = f"{self._where}-{len(self.pictures) + 1}.{ending}"
                self.pictures[path] = picture
                self._line(f"[picture: {path}]")
                return
        if "text/plain" in data:
            self._line(str(data["text/plain"]))

    def _line(self, text: str) -> None:
        self._print(text if self._at_line_start else f"\n{text}")
        self._print("\n")

    def _print(self, text: str) -> None:
        if text:
            self._clip.add(text.encode("utf-8", "replace"))
            self._at_line_start = text.endswith("\n")


def _picture(mime: str, data: object) -> bytes:
    text = "".join(data) if isinstance(data, list) else str(data)
    if mime == "image/svg+xml":
        return text.encode("utf-8", "replace")
    try:
        return base64.b64decode(text)
    except binascii.Error:
        return b""


class Channels:
    """Connection to one kernel over its Unix sockets. `info`: its connection file, with paths of this machine."""

    def __init__(self, info: dict[str, Any]) -> None:
        import zmq
        import zmq.asyncio
        from jupyter_client.asynchronous.client import AsyncKernelClient

        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._context.setsockopt(zmq.LINGER, 0)
        self._client = AsyncKernelClient(context=self._context)
        self._client.load_connection_info(cast(Any, info))
        self._client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=False)
        self._shell: zmq.Socket[bytes] = zmq.Socket.shadow(self._client.shell_channel.socket.underlying)
        self._output: zmq.Socket[bytes] = zmq.Socket.shadow(self._client.iopub_channel.socket.underlying)
        self._poller = zmq.asyncio.Poller()
        for channel in (self._client.shell_channel, self._client.iopub_channel):
            self._poller.register(channel.socket, zmq.POLLIN)

    async def run(self, code: str, gathered: Gathered, *, silent: bool = False) -> bool:
        """Run a cell to its end; False when its last output did not come. Raises ValueError for no proper message."""
        number = self._client.execute(code, silent=silent, store_history=not silent, allow_stdin=False)
        replied, idle, seen, until = False, False, 0, 0.0
        while not (replied and idle):
            left = until - time.monotonic() if replied else IDLE_SECONDS
            if left <= 0:
                break
            await self._poller.poll(left * 1000)
            for message in self._waiting(self._output):
                seen += 1
                if message["parent_header"].get("msg_id") == number:
                    with _proper():
                        idle = gathered.add(message["msg_type"], message["content"]) or idle
            for message in self._waiting(self._shell):
                if message["parent_header"].get("msg_id") == number:
                    replied, until = True, time.monotonic() + IDLE_SECONDS
                    with _proper():
                        gathered.reply(message["content"])
            await asyncio.sleep(_REST_SECONDS if seen > _BUSY else 0)
        return idle

    async def listen(self, code: str) -> None:
        """Run a silent cell until its end is heard: what a kernel says while nobody is connected is lost."""
        while not await self.run(code, Gathered("", ""), silent=True):
            pass

    def close(self) -> None:
        """Close the sockets. Safe twice."""
        for channel in (self._client.shell_channel, self._client.iopub_channel):
            channel.stop()
        self._context.destroy(linger=0)

    def _waiting(self, socket: Any) -> Iterator[dict[str, Any]]:
        """Some of the messages that are there now. Raises ValueError for whatever is wrong with one."""
        import zmq

        for _ in range(_AT_ONCE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with _proper():
                _, parts = self._client.session.feed_identities(frames)
                message = self._client.session.deserialize(parts)
                if not isinstance(message["content"], dict) or not isinstance(message["parent_header"], dict):
                    raise ValueError("a message whose content is no map")
            yield message


@contextmanager
def _proper() -> Iterator[None]:
    """Raises ValueError for whatever is wrong with a message: the policy owns its kernel, and may sign anything."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"the kernel sent what is no Jupyter message: {error}") from error
