"""The overlay over an image, mounted by us, so that folders of the image can be removed and made again inside.

A folder that was removed and made again is marked in its extended attributes, and in a user namespace the kernel lets
only `user.*` ones be written, for which the mount must say `userxattr`. Apptainer's own mount does not: there such a
folder is an "Input/output error". So a launcher of ours makes the namespace, mounts in it, and becomes Apptainer, which
is given the mounted folder as its writable image.

    over/upper, over/work    what the box changed, and the kernel's own
    over/image, over/points  the layers below: the image, and empty mount points for what the image lacks
    over/root                where the whole is mounted, in the box's namespace alone
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from pipeline.errors import SandboxError
from workers.sandbox import programs
from workers.sandbox.boxes import layout

FOLDERS = ("upper", "work", "image", "points", "root")
MOUNTED = ("/dev", "/proc", "/tmp", "/var/tmp")
MOUNTED_FILES = ("/etc/hostname", "/etc/resolv.conf")
"""What Apptainer mounts on, besides what it is told to."""

REFUSED = "our own overlay can't be mounted"
"""What the launcher says where the kernel does not do it."""

TRY_SECONDS = 10.0
MOST_LINKS = 40
_UNSHARE = ("unshare", "--user", "--map-root-user")

_LAUNCH = f"""
cd -- "$1" && mount --rbind -- "$2" image &&
    mount -t overlay overlay -o lowerdir=image:points,upperdir=upper,workdir=work,userxattr root ||
    {{ echo "{REFUSED}" >&2; exit 1; }}
cd /
shift 2
exec "$@"
"""
"""Relative paths: in mount options a comma or a colon in a folder's name would mean something else."""


async def unshare() -> list[str]:
    """What stands before a command that is root in a user namespace of its own.

    Where this user has subordinate ids they are its users inside; else there is root alone.
    """
    every = [*_UNSHARE, "--map-auto"]
    try:
        code, _ = await programs.run([*every, "true"], seconds=TRY_SECONDS)
    except OSError as error:
        raise SandboxError(f"unshare (util-linux) can't be started, and sandboxes need it: {error}") from error
    return every if code == 0 else list(_UNSHARE)


def prepare(over: Path, image: Path, folders: Iterable[str], binds: Iterable[str]) -> None:
    """Make the layers' folders in `over`; it may be for a box that starts again.

    Where the image lacks what Apptainer mounts on, an empty one is there: what it always mounts, absolute paths
    `folders`, and the targets of `binds` (`FROM:TO[:ro]`). Raises SandboxError.
    """
    layout.make_below(over, FOLDERS)
    wanted = dict.fromkeys((*MOUNTED, *folders), True) | dict.fromkeys(MOUNTED_FILES, False)
    for bind in binds:
        outside, inside = bind.split(":")[:2]
        wanted[inside] = os.path.isdir(outside)
    for name, is_folder in wanted.items():
        place = _place(image, name)
        layout.make_below(over / "points", [str(place if is_folder else place.parent)])
        if not is_folder:
            (over / "points" / place).touch(mode=0o644)


def launch(before: Sequence[str], over: Path, image: Path, argv: Sequence[str]) -> list[str]:
    """The command line that mounts `over/root` and becomes `argv`. `before`: what `unshare` said."""
    return [*before, "--mount", "/bin/sh", "-c", _LAUNCH, "sh", str(over), str(image), *argv]


def _place(image: Path, name: str) -> PurePosixPath:
    """Where an absolute path inside leads, relative to the image's root: its links are followed as they are inside."""
    at, left, links = PurePosixPath(), list(reversed(PurePosixPath(name).parts)), 0
    while left:
        part = left.pop()
        if part == "/":
            at = PurePosixPath()
        elif part == "..":
            at = at.parent
        else:
            try:
                target = os.readlink(image / at / part)
            except OSError:  # no link, or not there
                at /= part
                continue
            links += 1
            if links > MOST_LINKS:
                raise SandboxError(f"the image {image} has a link at {name} that leads nowhere")
            left += reversed(PurePosixPath(target).parts)
    return at
