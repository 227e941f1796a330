"""Locks of the kernel on open files: they end with the process that holds them, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def locked(lock: int) -> bool:
    """Take the exclusive lock on an open file, if nobody has it or shares it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def tried(path: Path) -> Iterator[bool]:
    """An exclusive lock if it can be had at once, let go at the end: `with tried(path) as free`."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield locked(lock)
    finally:
        os.close(lock)
