"""Small things on disk that the cache stands on: locks that are tried, notes in JSON, and what kind of disk it is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHARED_DISKS = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "9p", "panfs", "fuse.sshfs", "wekafs")
"""File systems that other machines see too: locks and renames there are slow, or mean nothing on the other side."""


def key_of(text: str) -> str:
    """A file name for any text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_json(path: Path) -> dict[str, Any]:
    """A note of ours; empty where there is none, or a damaged one (what it says is found out anew then)."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def filesystem(folder: Path) -> str:
    """The type of the file system that holds `folder`, as /proc/mounts names it; empty where that can't be told."""
    import psutil

    real, best, kind = folder.resolve(), Path(), ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if real.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, mount.fstype
    return kind


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
