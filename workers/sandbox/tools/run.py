"""Runs one short program inside a box with bytes in and bytes out: bounded in size and time, nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import NamedTuple

from workers.sandbox.programs import reap
from workers.sandbox.tools.inside import Inside, unhurried

TOOL = "files"
ERRORS_BYTES = 4096
"""Bytes of standard error that are kept: its beginning says why."""

_CHUNK = 1 << 18


class Ran(NamedTuple):
    """What a program did. `code` as a shell says it; None when it was ended because it wrote more than it might."""

    code: int | None
    output: bytes
    errors: str


async def run(inside: Inside, script: str, *arguments: str, feed: bytes = b"", most: int, seconds: float) -> Ran:
    """Run `script` by sh inside, `arguments` as its $1 and on, `feed` as its input; keep at most `most` bytes.

    Raises SandboxError when the box can't be had, TimeoutError when `seconds` are over.
    """
    await inside.revive()
    process = await asyncio.create_subprocess_exec(
        *inside.box.command(["sh", "-c", script, "sh", *arguments]),
        env=inside.environment(TOOL, LC_ALL="C"),
        cwd="/",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_CHUNK,
        process_group=0,  # not for Ctrl-C in the worker's terminal
    )
    try:
        async with asyncio.timeout(seconds):
            return await _talk(process, feed, most)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"the sandbox did not finish within {seconds:g} s") from None
    finally:
        await unhurried(_finish(inside, process))


async def _talk(process: asyncio.subprocess.Process, feed: bytes, most: int) -> Ran:
    assert process.stdout is not None and process.stderr is not None
    feeding = asyncio.ensure_future(_feed(process, feed))
    complaining = asyncio.ensure_future(_read(process.stderr, ERRORS_BYTES, go_on=True))
    try:
        output = await _read(process.stdout, most + 1)
        if len(output) > most:
            return Ran(None, output[:most], "")
        errors = (await complaining).decode("utf-8", "replace")
        await feeding
        code = await process.wait()
        return Ran(code if code >= 0 else 128 - code, output, errors)
    finally:
        for task in (feeding, complaining):
            task.cancel()
        await asyncio.gather(feeding, complaining, return_exceptions=True)


async def _feed(process: asyncio.subprocess.Process, feed: bytes) -> None:
    """Write the program's input; one that does not want all of it is no error."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(feed)
        await process.stdin.drain()
    process.stdin.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.wait_closed()


async def _read(stream: asyncio.StreamReader, most: int, go_on: bool = False) -> bytes:
    """At most `most` bytes; with `go_on` what comes after them is read too, and dropped."""
    parts: list[bytes] = []
    size = 0
    while size < most or go_on:
        data = await stream.read(_CHUNK)
        if not data:
            break
        parts.append(data[: max(0, most - size)])
        size += len(data)
    return b"".join(parts)


async def _finish(inside: Inside, process: asyncio.subprocess.Process) -> None:
    """End the program, with what it started, if it still runs."""
    if process.returncode is None:
        await inside.end(process.pid)
    await reap(process)
