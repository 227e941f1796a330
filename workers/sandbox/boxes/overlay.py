"""The overlay over an image, mounted by us, so that folders of the image can be removed and made again inside.

A folder that was removed and made again is marked in its extended attributes, and in a user namespace the kernel lets
only `user.*` ones be written, for which the mount must say `userxattr`. Apptainer's own mount does not: there such a
folder is an "Input/output error". So a launcher of ours makes the namespace, mounts in it, and becomes Apptainer, which
is given the mounted folder as its writable image.

    over/upper, over/work  what the box changed, and the kernel's own
    over/points            the lowest layer, below the image: empty mount points for what that lacks
    over/root              where the whole is mounted, in the box's namespace alone

It takes a kernel of 5.11 or newer, and a disk whose file system keeps such attributes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from pipeline.errors import SandboxError
from workers.sandbox import programs

FOLDERS = ("upper", "work", "points", "root")
MOUNTED = ("/dev", "/proc", "/tmp", "/var/tmp")
MOUNTED_FILES = ("/etc/hostname", "/etc/resolv.conf")
"""What Apptainer mounts on, besides what it is told to."""

REFUSED = "our own overlay can't be mounted"
"""What the launcher says where the kernel does not do it."""

TRY_SECONDS = 10.0
MOST_LINKS = 40
_UNSHARE = ("unshare", "--user", "--map-root-user")

_HERE = "/proc/self/fd/3"
_LAUNCH = f"""
exec 3<"$1" && cd -- "$2" &&
    mount -t overlay overlay "$1/root" \\
        -o lowerdir=.:{_HERE}/points,upperdir={_HERE}/upper,workdir={_HERE}/work,userxattr ||
    {{ echo "{REFUSED}" >&2; exit 1; }}
exec 3<&-
cd /
shift 2
exec "$@"
"""
"""The folders' names stand in no mount option, where a comma or a colon in them would mean something else."""


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
    """Make the layers' folders in `over`, which is empty: once a box, for what it changed lies in them afterwards.

    Where the image lacks what Apptainer mounts on, an empty one is there: what it always mounts, absolute paths
    `folders`, and the targets of `binds` (`FROM:TO[:ro]`). Raises SandboxError, OSError.
    """
    for name in FOLDERS:
        (over / name).mkdir()
        (over / name).chmod(0o755)  # whatever this process's umask is: `upper` gives the mode of the folder /
    wanted = dict.fromkeys((*MOUNTED, *folders), True) | dict.fromkeys(MOUNTED_FILES, False)
    for bind in binds:
        outside, inside = bind.split(":")[:2]
        wanted[inside] = os.path.isdir(outside)
    for name, is_folder in wanted.items():
        place = over / "points" / _place(image, name)
        (place if is_folder else place.parent).mkdir(parents=True, exist_ok=True)
        if not is_folder:
            place.touch()


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
                raise SandboxError(f"the image {image} has links at {name} that lead round in circles")
            left += reversed(PurePosixPath(target).parts)
    return at
