"""`rollout doctor` on the folder that holds Redis's data: how long an fsync takes there, and what that means.

Redis writes its append-only file at once and asks for an fsync every second (`appendfsync everysec`). A machine that
dies loses what was not yet synced: the writes of the last second, of two when an fsync takes long. When one takes more
than two seconds, Redis makes its clients wait for it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path

from pipeline.config import Config
from workers.doctor import Finding

ROUNDS = 40
MOST_SECONDS = 5.0
"""The measurement ends after so long, however slow the folder is."""
BYTES = 4096
REDIS_WAITS = 2.0
"""Seconds of one fsync from which on Redis holds its clients' writes back."""
SLOW = 0.2
"""Seconds of the usual fsync beyond which a busy line must expect that."""


async def findings(config: Config) -> list[Finding]:
    """Nothing where no folder is named: the data of a server that is thrown away need not last."""
    wanted = folder_of(config)
    if wanted is None:
        return []
    folder = next(place for place in (wanted, *wanted.parents) if place.exists())
    try:
        spent = await asyncio.to_thread(measure, folder)
    except OSError as error:
        text = f"{folder} can't be written: {error.strerror}"
        return [Finding("fsync", "fail", text, "make it, or give another one (slurm.folder, redis.data)")]
    return [judged(folder, spent, config.slurm.lock if config.slurm.folder else 0.0)]


def folder_of(config: Config) -> Path | None:
    """Where Redis's data lie, or will: slurm.folder, else redis.data."""
    named = config.slurm.folder or config.redis.data
    return config.path_of(named).absolute() if named else None


def measure(folder: Path, rounds: int = ROUNDS) -> list[float]:
    """Seconds of each of some dozens of small writes with their fsync, as Redis does them. Raises OSError."""
    path = folder / f".fsync-{secrets.token_hex(6)}"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    spent: list[float] = []
    try:
        data = secrets.token_bytes(BYTES)
        until = time.perf_counter() + MOST_SECONDS
        while len(spent) < rounds and time.perf_counter() < until:
            began = time.perf_counter()
            os.write(handle, data)
            os.fdatasync(handle)
            spent.append(time.perf_counter() - began)
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)
    return spent


def judged(folder: Path, spent: list[float], lock: float) -> Finding:
    """What these times mean for `appendfsync everysec`, and for a lock of `lock` seconds (0: there is none)."""
    usual, worst = sorted(spent)[len(spent) // 2], max(spent)
    times = f"{_said(usual)} for one in {folder}, {_said(worst)} at worst ({len(spent)} measured)"
    lost = "a machine that dies loses the last second of what Redis was told"
    if lock and worst >= lock / 2:
        mend = "another folder, or a longer slurm.lock"
        return Finding("fsync", "fail", f"{times}: the lock of {lock:g} s would be lost while it waits for one", mend)
    if worst >= REDIS_WAITS:
        text = f"{times}: Redis makes its clients wait for each that takes over {REDIS_WAITS:g} s; {lost}, or more"
        return Finding("fsync", "warn", text, "put slurm.folder (or redis.data) on a faster file system")
    if usual >= SLOW:
        text = f"{times}: when the line is busy it may take over {REDIS_WAITS:g} s, and Redis makes its clients wait"
        return Finding("fsync", "warn", f"{text}; {lost}, or two", "put slurm.folder (or redis.data) on a faster one")
    return Finding("fsync", "ok", f"{times}: good for `everysec`; {lost}")


def _said(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
