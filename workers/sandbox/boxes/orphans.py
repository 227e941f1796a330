"""Whose folders these are: a living host process holds the lock in its folder, and what a dead one left is removed.

Ownership is judged by the lock, which the kernel frees with its holder, and never by a pid or a name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path

from pipeline.errors import SandboxError
from workers.sandbox import processes
from workers.sandbox.boxes import layout
from workers.sandbox.boxes.kept import KEEPER
from workers.sandbox.boxes.limits import remove_cgroup
from workers.sandbox.locks import locked

log = logging.getLogger(__name__)

OWNER = "owner"
UNMOUNT_SECONDS = 10.0
LOOK_SECONDS = 0.3
"""How long somebody who only looks whether a host lives may hold the lock."""


class Owner:
    """A root that is this process's until `close` or its end."""

    def __init__(self, root: Path, lock: int) -> None:
        self.root = root
        self._lock = lock

    def close(self) -> None:
        """Give it up; the folder stays for whoever sweeps. Safe twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def claim_root(root: Path) -> Owner:
    """Make `root` and hold it for life. Raises SandboxError when another living process does."""
    layout.make_root(root)
    lock = os.open(root / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not _locked_soon(lock):
        os.close(lock)
        raise SandboxError(f"{root} belongs to another living process: two must not share a folder for sandboxes")
    try:
        same = os.fstat(lock).st_ino == os.stat(root / OWNER).st_ino
    except FileNotFoundError:
        same = False
    if not same:  # a sweep took the folder away between the two steps
        os.close(lock)
        return claim_root(root)
    os.truncate(lock, 0)
    os.write(lock, f"{processes.identity(os.getpid())}\n".encode())
    return Owner(root, lock)


def _locked_soon(lock: int) -> bool:
    until = time.monotonic() + LOOK_SECONDS
    while not locked(lock):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def sweep(parent: Path) -> list[str]:
    """Remove the folders under `parent` whose hosts are dead, with all that still runs in them.

    Comes back with the names of what was removed. Living hosts' folders are not touched; what can't be removed is
    logged and left for the next sweep.
    """
    removed = []
    with contextlib.suppress(FileNotFoundError):
        for root in sorted(parent.iterdir()):
            about = root.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                removed += _sweep_root(root)
    return removed


def _sweep_root(root: Path) -> list[str]:
    """One host's folder. A folder without an owner is one that is being made, or of somebody else's: left alone."""
    try:
        lock = os.open(root / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return []
    removed = []
    try:
        if not locked(lock):
            return []
        for folder in sorted(path for path in root.iterdir() if path.name != OWNER):
            try:
                end_all(folder)
                layout.remove(folder)
                removed.append(f"{root.name}/{folder.name}")
            except (OSError, SandboxError, subprocess.SubprocessError) as error:
                log.warning("what a dead host left in %s can't be removed now: %s", folder, error)
        if set(os.listdir(root)) == {OWNER}:
            shutil.rmtree(root)
            removed.append(root.name)
    finally:
        os.close(lock)
    return removed


def end_all(folder: Path) -> None:
    """End what still runs in a dead host's box, take away its cgroups and what is still mounted below it.

    Raises SandboxError for a process that does not end, OSError for a cgroup, SubprocessError for a mount.
    """
    keeper = processes.identified(_read(folder / KEEPER))
    if keeper is not None:
        processes.kill(keeper)
    left = processes.kill_all(str(folder))
    if left:
        raise SandboxError(f"processes {[item.pid for item in left]} do not end")
    if keeper is not None and not processes.wait(keeper):
        raise SandboxError(f"the first process of the sandbox, {keeper.pid}, does not end")
    for place in _mounts_below(folder):
        unmount = shutil.which("fusermount3") or shutil.which("fusermount") or "umount"
        argv = [unmount, *(["-u", "-z"] if "fusermount" in unmount else ["-l"]), place]
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=UNMOUNT_SECONDS, check=False)
    for line in _read(folder / "cgroups").splitlines():
        group = Path(line)
        if re.fullmatch(rf"rollout-{re.escape(folder.name)}-[0-9a-f]+", group.name):
            remove_cgroup(group)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _mounts_below(folder: Path) -> list[str]:
    """Mount points of this machine below the folder, the deepest first."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        places = [re.sub(r"\\([0-7]{3})", lambda hit: chr(int(hit[1], 8)), line.split()[4]) for line in file]
    return sorted((place for place in places if Path(place).is_relative_to(folder)), key=len, reverse=True)


def hosts(parent: Path) -> list[tuple[Path, bool]]:
    """The hosts' folders under `parent`, each with whether its host lives."""
    found = []
    for root in sorted(parent.iterdir()) if parent.is_dir() else []:
        try:
            lock = os.open(root / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        found.append((root, not locked(lock)))
        os.close(lock)
    return found


def boxes(root: Path) -> list[Path]:
    """The boxes' folders of one host, half-made ones too."""
    names = sorted(name for name in os.listdir(root) if name != OWNER) if root.is_dir() else []
    return [root / name for name in names if name.startswith(layout.PART_PREFIX) or is_box(root / name)]


def is_box(path: Path) -> bool:
    """Whether an entry of a host's folder is a box; drivers keep their own things under names with a dot."""
    return not path.name.startswith(".") and path.is_dir()
