"""Small things on disk that the cache stands on: names of files, notes in JSON, and what kind of disk it is."""

from __future__ import annotations

import hashlib
import json
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
