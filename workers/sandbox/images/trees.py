"""Whole folders of images: measured, and touched as root where their files belong to sub-ids of a plain user."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def as_root(*more: str) -> list[str]:
    """What stands before a command that must act as root over its user's own files and sub-ids; empty for root.

    `more`: further options of `unshare`.
    """
    return [] if os.getuid() == 0 else ["unshare", "--map-root-user", "--map-auto", *more, "--"]


def size(tree: Path) -> int:
    """Bytes on disk; a file with several names counts once. What can't be read is left out."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for folder, names, files in os.walk(tree):
        for name in (*names, *files):
            with suppress(OSError):
                found = os.lstat(os.path.join(folder, name))
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total
