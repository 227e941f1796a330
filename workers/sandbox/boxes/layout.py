"""Folders of boxes on disk: a root of this user alone, one short folder a box, and how they are removed whole."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from pipeline.errors import HandlerError, SandboxError
from workers.sandbox.box import Spec

PARTS = ("home", "tmp", "over", "run")
"""Folders of a box: home, private /tmp, the overlay over its image, and Unix sockets."""

PART_PREFIX = ".part-"
LONGEST_SOCKETS = 88
"""Bytes of the sockets' folder: a Unix socket's path may have 107, and its name needs some."""

REMOVE_SECONDS = 120.0
_REMOVE = """
rm -rf --one-file-system -- "$1" 2>/dev/null && exit
chmod -R u+rwx -- "$1" 2>/dev/null
exec rm -rf --one-file-system -- "$1"
"""
"""By programs: a tree may be deeper than Python's stack, and each level would cost this process an open file."""

_AS_MAPPED_ROOT = ("unshare", "--user", "--map-root-user", "--map-auto")
"""The root of such a namespace may remove what belongs to this user's subordinate ids: root of a sandbox made it."""

_CONTRADICTIONS = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def make_root(root: Path) -> None:
    """Make `root`. It is this user's alone: in a shared /tmp somebody else may have put something there before."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = root.lstat()
    except OSError as error:
        raise SandboxError(
            f"sandbox.root: the folder {root} can't be made ({error.strerror}): set sandbox.root to a folder on a "
            "local disk that this user may write to, or leave it empty"
        ) from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise SandboxError(f"sandbox.root {root} must be a folder of this user alone: chmod 700, or set another")


def folder_of(root: Path, name: str) -> Path:
    """The folder of the box called `name`, whatever characters that has. Raises SandboxError for a root too long."""
    folder = root / hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    if len(os.fsencode(folder / "run")) > LONGEST_SOCKETS:
        raise SandboxError(
            f"the folder {root} is too long a path for Unix sockets in it: set sandbox.root to a shorter one"
        )
    return folder


def build(root: Path, name: str, spec: Spec) -> Path:
    """Make the box's folder with its files in the home; what stood there before is removed.

    Raises SandboxError, and HandlerError for files that can't stand beside each other.
    """
    make_root(root)
    folder = folder_of(root, name)
    try:
        remove(folder)
        part = Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=root))
        try:
            for inside in PARTS:
                (part / inside).mkdir(mode=0o700)
            _write_files(part / "home", spec)
            (part / "name").write_text(name, "utf-8", "replace")
            os.rename(part, folder)
        except BaseException:
            remove(part)
            raise
    except OSError as error:
        raise SandboxError(f"the sandbox folder {folder} can't be made: {error}") from error
    return folder


def make_below(base: Path, places: Iterable[str]) -> None:
    """Make folders, relative paths below `base`, for something to be mounted over them.

    Of a box that starts again the agent may have put links there: none is followed. Raises SandboxError for what is in
    the way.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for place in places:
        at = os.open(base, flags)
        try:
            for part in PurePosixPath(place).parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=at)
                below = os.open(part, flags, dir_fd=at)
                os.close(at)
                at = below
        except OSError as error:
            raise SandboxError(
                f"the sandbox can't start again: {base / place} must be a folder ({error.strerror})"
            ) from error
        finally:
            os.close(at)


def _write_files(home: Path, spec: Spec) -> None:
    for path, content in spec.files.items():
        target = home / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
        except OSError as error:
            if error.errno not in _CONTRADICTIONS:
                raise
            raise HandlerError(
                f"the sandbox's file {path!r} can't be written: {error.strerror}: correct `files`"
            ) from None


async def build_whole(root: Path, name: str, spec: Spec) -> Path:
    """`build` in a thread; whoever is cancelled meanwhile leaves nothing."""
    building = asyncio.ensure_future(asyncio.to_thread(build, root, name, spec))
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        await asyncio.wait([building])
        if building.exception() is None:
            await asyncio.to_thread(remove, building.result())
        raise


def remove(folder: Path) -> None:
    """Remove the folder whatever its depth, modes and owners are. Raises SandboxError for what stays."""
    for way in ((), _AS_MAPPED_ROOT):
        if not os.path.lexists(folder):
            return
        argv = [*way, "/bin/sh", "-c", _REMOVE, "sh", str(folder)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # what is left is looked at
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=REMOVE_SECONDS, cwd="/"
            )
    if os.path.lexists(folder):
        raise SandboxError(
            f"the sandbox folder {folder} can't be removed whole: files of other users, or a mount, are left in it"
        )
