"""Folders of boxes on disk: a root of this user alone, one short folder a box, and how they are removed whole."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pipeline.errors import SandboxError
from workers.sandbox.box import Spec

PARTS = ("home", "tmp", "over", "run")
"""Folders of a box: home, private /tmp, the overlay over its image, and Unix sockets."""

PART_PREFIX = ".part-"
LONGEST_SOCKETS = 88
"""Bytes of the sockets' folder: a Unix socket's path may have 107, and its name needs some."""

REMOVE_SECONDS = 120.0


def make_root(root: Path) -> None:
    """Make `root`. It is this user's alone: in a shared /tmp somebody else may have put something there before."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = root.lstat()
    except OSError as error:
        raise SandboxError(f"sandbox.root {root} can't be made: {error}") from error
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
    """Make the box's folder with its files in the home; what stood there before is removed. Raises SandboxError."""
    make_root(root)
    folder = folder_of(root, name)
    try:
        remove(folder)
        part = Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=root))
        for inside in PARTS:
            (part / inside).mkdir(mode=0o700)
        for path, content in spec.files.items():
            target = part / "home" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
        (part / "name").write_text(name, "utf-8", "replace")
        os.rename(part, folder)
    except OSError as error:
        raise SandboxError(f"the sandbox folder {folder} can't be made: {error}") from error
    return folder


async def build_whole(root: Path, name: str, spec: Spec) -> Path:
    """`build` in a thread; whoever is cancelled meanwhile leaves nothing."""
    building = asyncio.ensure_future(asyncio.to_thread(build, root, name, spec))
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        await asyncio.wait([building])
        if building.exception() is None:
            await remove_later(building.result())
        raise


def remove(folder: Path) -> None:
    """Remove the folder whatever its modes and owners are. Raises SandboxError for what stays."""
    shutil.rmtree(folder, onerror=_make_removable)
    if not os.path.lexists(folder):
        return
    _remove_as_mapped_root(folder)
    if os.path.lexists(folder):
        raise SandboxError(
            f"the sandbox folder {folder} can't be removed whole: files of other users, or a mount, are left in it"
        )


async def remove_later(folder: Path) -> None:
    """`remove` in a thread."""
    await asyncio.to_thread(remove, folder)


def _make_removable(function: Any, path: str, error: Any) -> None:
    """A command may have taken the write bit off a folder; what is gone already is no error, the rest comes later."""
    if not os.path.lexists(path):
        return
    try:
        for place in (os.path.dirname(path), path):
            if not os.path.islink(place):
                os.chmod(place, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        return  # a file of a subordinate id: `remove` looks whether anything is left, and takes the other way


def _remove_as_mapped_root(folder: Path) -> None:
    """Files of this user's subordinate ids (root of a sandbox made them) can be removed by the root of a namespace."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return
    argv = [unshare, "--user", "--map-root-user", "--map-auto", "rm", "-rf", "--one-file-system", "--", str(folder)]
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=REMOVE_SECONDS, cwd="/")
