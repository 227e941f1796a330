"""Runs the queue's Lua scripts: many calls of one event-loop turn travel as one pipeline.

A script is `lua/prelude.lua` + `lua/<verb>.lua`, called by its SHA; a server that does not know it (restart, SCRIPT
FLUSH) is taught and asked again. redis-py may resend a command whose reply was lost, so every script is idempotent.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

Command = tuple[Any, ...]


@cache
def text(verb: str) -> str:
    """The Lua of a verb, prelude first."""
    folder = files("pipeline") / "lua"
    return "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in ("prelude", verb))


@cache
def sha(verb: str) -> str:
    return hashlib.sha1(text(verb).encode()).hexdigest()


def script_call(verb: str, prefix: str, args: tuple[Any, ...]) -> Command:
    return ("EVALSHA", sha(verb), 1, prefix, *args)


def run_script(client: redis.Redis, verb: str, prefix: str, args: tuple[Any, ...]) -> Any:
    """The reply of a verb's script on a plain client, for the threads that have one of their own."""
    command = script_call(verb, prefix, args)
    try:
        return client.execute_command(*command)  # type: ignore[no-untyped-call]
    except NoScriptError:
        client.script_load(text(verb))
        return client.execute_command(*command)  # type: ignore[no-untyped-call]


class Pipeliner:
    """Sends commands to Redis; those issued in the same turn of the event loop share one round trip.

    One round trip is in flight at a time; while it is, further commands gather for the next one. A fault
    of one command (OOM, NOSCRIPT) is that command's alone; a lost connection is every waiting command's.
    """

    BATCH = 200
    """Commands in one round trip at most; bounds the time that a small command waits behind large ones."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: list[tuple[Command, asyncio.Future[Any]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def execute(self, *command: Any) -> Any:
        """The reply of one command. Raises RedisError (ConnectionError and TimeoutError: nobody knows if it ran)."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, future))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return await future

    async def script(self, verb: str, prefix: str, *args: Any) -> Any:
        """The reply of a verb's script; a server that does not know it is taught first."""
        try:
            return await self.execute(*script_call(verb, prefix, args))
        except NoScriptError:
            await self.execute("SCRIPT", "LOAD", text(verb))
            return await self.execute(*script_call(verb, prefix, args))

    async def close(self, within: float = 0.5) -> None:
        """Let the round trip in flight end, for `within` seconds; a connection that is closed under it would leak."""
        if self._flusher is None:
            return
        await asyncio.wait({self._flusher}, timeout=within)
        self._flusher.cancel()
        await asyncio.wait({self._flusher})

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.BATCH], self._waiting[self.BATCH :]
            try:
                replies = await self._round_trip([command for command, _ in batch])
            except (RedisError, OSError) as error:
                replies = [error] * len(batch)
            except Exception as error:  # one can't be sent (a lone surrogate): its neighbours must not wait for ever
                replies = [error] if len(batch) == 1 else [await self._alone(command) for command, _ in batch]
            except asyncio.CancelledError:
                for _, future in batch:
                    future.cancel()
                raise
            for (_, future), reply in zip(batch, replies, strict=True):
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)

    async def _alone(self, command: Command) -> Any:
        """One command's reply, or what it raised."""
        try:
            return (await self._round_trip([command]))[0]
        except Exception as error:
            return error

    async def _round_trip(self, commands: list[Command]) -> list[Any]:
        if len(commands) == 1:
            return [await self._client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return list(await pipe.execute(raise_on_error=False))
