"""Short programs of ours, run to their end: bounded in time, and nothing left of them when the caller is cancelled."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence


async def run(
    argv: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
    errors: bool = True,
) -> tuple[int, str]:
    """Exit code, and what was written (with `errors` also to stderr), without blank ends.

    `env` None: this process's own; `keep`: descriptors that are inherited. Raises OSError when it can't be started,
    TimeoutError with a sentence when it takes longer than `seconds`.
    """
    process = await asyncio.create_subprocess_exec(
        *argv, env=env, cwd="/", stdin=DEVNULL, stdout=PIPE, stderr=STDOUT if errors else DEVNULL, pass_fds=keep,
        process_group=0,  # not for Ctrl-C in the worker's terminal
    )  # fmt: skip
    try:
        async with asyncio.timeout(seconds):
            said, _ = await process.communicate()
    except TimeoutError:
        raise TimeoutError(f"{argv[0]} did not end within {seconds:g} s") from None
    finally:
        await reap(process)
    return process.returncode or 0, said.decode("utf-8", "replace").strip()


async def reap(process: asyncio.subprocess.Process) -> None:
    """Close a process's pipes, though something may hold their other ends, and wait for its end.

    That ends it too, where it still runs.
    """
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()  # before the wait, which lasts until the pipes are closed
    await process.wait()
    await asyncio.sleep(0)  # the pipes' own closing is scheduled for the next turn
