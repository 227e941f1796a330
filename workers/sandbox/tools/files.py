"""Files of a box, read and written by plain POSIX tools that run inside: no path can leave the sandbox.

The scripts say what went wrong by their exit code, 100 + errno, after looking themselves; only what they can't foresee
(a full disk) is read from a tool's message in the C locale.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from typing import NoReturn

from pipeline.errors import SandboxError
from workers.sandbox.tools.inside import Inside
from workers.sandbox.tools.run import Ran, run

MB = 1 << 20
_FLAG = 100
_LONGEST_PATH = 4096

_WHY = """
fail() { exit $((100 + $1)); }
missing() {
    d=$1
    while [ "$d" != / ]; do
        d=${d%/*}; d=${d:-/}
        if [ -d "$d" ]; then [ -x "$d" ] || fail 13; fail 2; fi
        if [ -e "$d" ]; then fail 20; fi
    done
    fail 2
}
folder() {
    d=$1
    until [ -e "$d" ]; do d=${d%/*}; d=${d:-/}; done
    [ -d "$d" ] || fail 20
    [ -w "$d" ] && [ -x "$d" ] || fail 13
    [ "$d" = "$1" ] || mkdir -p -- "$1" || exit 1
}
"""
"""`missing PATH`: why there is nothing at PATH: permission (13), a file as a folder (20), or simply nothing (2).
`folder PATH`: make a folder, or say why that can't be."""

_FILE = '[ -d "$1" ] && fail 21; [ -e "$1" ] || missing "$1"; [ -f "$1" ] || fail 22; [ -r "$1" ] || fail 13\n'
_READ = _WHY + _FILE + 'exec head -c "$2" < "$1"'
_READ_FROM = _WHY + _FILE + 'exec 3< "$1"; tail -c +"$3" <&3 2>/dev/null | head -c "$2"'
_WRITE = (
    _WHY
    + """
[ -d "$1" ] && fail 21
if [ -e "$1" ]; then
    [ -f "$1" ] || fail 22
    [ -w "$1" ] || fail 13
else
    case $1 in */) fail 21;; esac
    folder "$2"
fi
exec cat > "$1"
"""
)
_UPLOAD = (
    _WHY
    + """
command -v tar >/dev/null || fail 38
folder "$1"
exec tar -xof - -C "$1"
"""
)
_DOWNLOAD = (
    _WHY
    + """
command -v tar >/dev/null || fail 38
[ -e "$1" ] || [ -L "$1" ] || missing "$1"
[ -d "$1" ] || [ -f "$1" ] || [ -L "$1" ] || fail 22
[ -r "$1" ] || [ -L "$1" ] || fail 13
exec tar -cf - -C "$2" -- "$3"
"""
)
_CHANGED = ("file changed as we read it", "file removed before we read it", "socket ignored")
"""Complaints of tar about a folder in use: the archive is whole nevertheless."""


class Files:
    """Reads and writes in one box. `most`: bytes of one transfer; `seconds`: time of one transfer."""

    def __init__(self, inside: Inside, most: int, seconds: float) -> None:
        self._inside = inside
        self._most = most
        self._seconds = seconds
        self._editing = asyncio.Lock()

    async def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a regular file from `start`. Raises OSError, and ValueError for more than the limit."""
        if start < 0 or (size is not None and size < 0):
            raise ValueError(f"start {start} and size {size} must not be negative")
        if size is not None and size > self._most:
            raise ValueError(f"{size} bytes of {path!r} are more than the limit of {self._limit()}: read it in parts")
        place, count = self._place(path), str(self._most + 1 if size is None else size)
        if start:
            ran = await self._run(path, _READ_FROM, place, count, str(start + 1), most=self._most)
        else:
            ran = await self._run(path, _READ, place, count, most=self._most)
        if ran.code is None:
            raise ValueError(f"{path!r} is larger than the limit of {self._limit()}: read it in parts")
        return ran.output

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole; an existing one keeps its mode. Raises OSError (it may be cut then), ValueError."""
        if len(data) > self._most:
            raise ValueError(f"{len(data)} bytes for {path!r} are more than the limit of {self._limit()}")
        place = self._place(path)
        await self._run(path, _WRITE, place, posixpath.dirname(place), feed=data)

    async def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must stand exactly once. Raises OSError, and ValueError with the count."""
        wanted, put = old.encode("utf-8", "surrogateescape"), new.encode("utf-8", "surrogateescape")
        if not wanted:
            raise ValueError("the text to replace is empty: give the text as it stands in the file")
        async with self._editing:
            data = await self.read(path)
            count = _count(data, wanted)
            if count != 1:
                raise ValueError(
                    f"the text to replace stands {count} times in {path!r}, not once: "
                    + ("give it exactly as the file has it" if count == 0 else "give more of what is around it")
                )
            await self.write(path, data.replace(wanted, put))

    async def upload(self, path: str, tar: bytes) -> None:
        """Unpack a plain tar archive into the folder `path`, which is made. Raises OSError, ValueError."""
        if len(tar) > self._most:
            raise ValueError(f"an archive of {len(tar)} bytes is more than the limit of {self._limit()}")
        await self._run(path, _UPLOAD, self._place(path), feed=tar, bad="could not be unpacked as a tar archive")

    async def download(self, path: str) -> bytes:
        """A file or folder as a plain tar archive in which it stands under its own name. Raises OSError, ValueError."""
        place = self._place(path).rstrip("/") or "/"
        folder, name = posixpath.split(place)
        ran = await self._run(path, _DOWNLOAD, place, folder, name or ".", most=self._most)
        if ran.code is None:
            raise ValueError(f"{path!r} as an archive is larger than the limit of {self._limit()}")
        return ran.output

    async def _run(
        self, path: str, script: str, *arguments: str, feed: bytes = b"", most: int = 0, bad: str = ""
    ) -> Ran:
        """Run a script; raises OSError for what it reports, ValueError(`bad`) for what has no errno."""
        for again in (True, False):
            ran = await run(self._inside, script, *arguments, feed=feed, most=most, seconds=self._seconds)
            if ran.code in (0, None) or (ran.code == 1 and any(word in ran.errors for word in _CHANGED)):
                return ran
            if again and not self._inside.box.alive():
                continue
            raise_for(ran, path, bad)
        raise SandboxError(f"the sandbox {self._inside.box.name} died while it handled {path!r}")

    def _place(self, path: str) -> str:
        """The absolute path inside. Raises OSError for one that no file can have."""
        place = posixpath.join(self._inside.box.home, path)
        if not path or "\0" in path:
            raise OSError(errno.EINVAL, "not a file's path", path)
        if len(os.fsencode(place)) >= _LONGEST_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:100])
        return place

    def _limit(self) -> str:
        return f"{self._most / MB:g} MB (sandbox.transfer_mb)"


def _count(data: bytes, wanted: bytes) -> int:
    """How often `wanted` stands in `data`, overlapping places included; counting ends at 1,000."""
    count, at = 0, data.find(wanted)
    while at >= 0 and count < 1000:
        count, at = count + 1, data.find(wanted, at + 1)
    return count


def raise_for(ran: Ran, path: str, bad: str) -> NoReturn:
    """OSError for what a script or its tool reported; ValueError with `bad` for what has no number."""
    code = ran.code or 0
    message = "; ".join(ran.errors.split("\n")).strip("; ")[:300]
    if code == 128 + 25:  # SIGXFSZ: the limit of what one file may have
        raise OSError(errno.EFBIG, "the sandbox's disk limit is reached", path)
    if code == _FLAG + errno.ENOSYS:
        raise OSError(errno.ENOSYS, "the image has no tar", path)
    if code in _FLAGS:
        raise OSError(code - _FLAG, os.strerror(code - _FLAG), path)
    number = next((number for number in _TOLD if os.strerror(number) in ran.errors), 0)
    if number:
        raise OSError(number, os.strerror(number), path)
    if bad:
        raise ValueError(f"what was given for {path!r} {bad}: {message}")
    raise OSError(errno.EIO, f"the sandbox could not do it (exit code {code}): {message or 'no message'}", path)


_FLAGS = {_FLAG + number for number in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)}
_TOLD = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EIO,
    errno.ENOENT,
)
