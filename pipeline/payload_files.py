"""Payloads in files: what is larger than `payload.inline_max` lies under `payload.dir`, and its key holds a reference.

A file is DIR/HOME/ab/HASH-NONCE. HOME is the line's own folder (key `files`: two lines may share a DIR), HASH is of the
key's parts (an id may be of any characters), and the nonce makes every write a file of its own: nobody can overwrite
another's. It is written beside its name, flushed, renamed, and the folder is flushed too: whoever reads the reference
finds all of it. All of this blocks, so it runs in threads of its own, never in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from pipeline import wire
from pipeline.config import Config
from pipeline.errors import ConfigError, EnvelopeError, PayloadFilesAway, PayloadFolderAway
from pipeline.whole_file import flush_folder

P = ParamSpec("P")
T = TypeVar("T")

MAGIC = b"@file1:"
"""How a reference begins (`held_in_file` in lua/prelude.lua knows it); a payload begins with zstd's own magic."""
THREADS = 8
"""Files that one process reads, writes or removes at a time."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a folder says that holds no more, or no more of this user's."""


class Reference(NamedTuple):
    """What the key of a payload in a file holds: its path under `payload.dir`, its bytes, their SHA-256."""

    path: str
    size: int
    digest: bytes

    def pack(self) -> bytes:
        return MAGIC + wire.pack({"path": self.path, "size": self.size, "digest": self.digest})


def reference_in(data: bytes) -> Reference | None:
    """The reference that these bytes of a key are; None for a payload. Raises EnvelopeError for a damaged one."""
    if not data.startswith(MAGIC):
        return None
    value = wire.unpack(data[len(MAGIC) :])
    if not (isinstance(value, dict) and isinstance(value.get("path"), str) and isinstance(value.get("digest"), bytes)):
        raise EnvelopeError("a reference to a payload file lacks path or digest", data)
    path, size = value["path"], value.get("size")
    if type(size) is not int or not 0 <= size <= wire.MAX_BYTES or not _inside(path):
        raise EnvelopeError(f"a reference to a payload file names {path!r:.80} with {size!r:.80} bytes", data)
    return Reference(path, size, value["digest"])


def _inside(path: str) -> bool:
    """HOME/ab/NAME, and nothing that leads elsewhere."""
    parts = path.split("/")
    return len(parts) == 3 and not any(part in ("", ".", "..") or "\0" in part for part in parts)


class PayloadFiles:
    """The folder `payload.dir` of these settings, as this machine sees it."""

    def __init__(self, config: Config) -> None:
        self.on = bool(config.payload.dir)
        self.root = config.path_of(config.payload.dir) if self.on else Path()
        self.most = config.payload.inline_max
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """What `call` returns, in a thread of this folder's: a file system that hangs holds up no other work."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "payload-files")
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **named))

    # -- files -------------------------------------------------------------------------------------------------------

    def write(self, home: str, about: str, data: bytes) -> Reference:
        """Write a new file in the line's folder; `about` names what it is for. Raises OSError; nothing is left then."""
        name = f"{hashlib.sha256(about.encode()).hexdigest()[:24]}-{os.urandom(8).hex()}"
        folder = self.root / home / name[:2]
        self._make(folder)
        part, path = folder / f"{name}.part", folder / name
        try:
            _write_flushed(part, data)
            part.rename(path)
            flush_folder(folder)
        except BaseException:
            for left in (part, path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise
        return Reference(f"{home}/{name[:2]}/{name}", len(data), hashlib.sha256(data).digest())

    def _make(self, folder: Path) -> None:
        """The shard's folder. The line's own is not made here: where it is missing, this is another file system."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
            flush_folder(folder.parent)

    def read(self, reference: Reference) -> bytes:
        """The file's bytes. Raises OSError, and EnvelopeError when they are not those that were written."""
        if not self.on:
            raise FileNotFoundError(errno.ENOENT, "payload.dir is not set", reference.path)
        with open(self.root / reference.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size == reference.size else b""
        if len(data) != reference.size:
            raise EnvelopeError(f"the payload file {reference.path} has {size} bytes, written were {reference.size}")
        if hashlib.sha256(data).digest() != reference.digest:
            raise EnvelopeError(f"the payload file {reference.path} was changed: its digest is another one")
        return data

    def remove(self, paths: Iterable[str]) -> int:
        """Remove files; how many were there. One that can't be removed is left for the sweep."""
        removed = 0
        for path in paths:
            with contextlib.suppress(OSError):
                (self.root / path).unlink()
                removed += 1
        return removed

    def size(self, path: str) -> int | None:
        """The bytes of a file; None when it is not there. Raises OSError."""
        try:
            return (self.root / path).stat().st_size
        except FileNotFoundError:
            return None

    def older(self, home: str, seconds: float) -> Iterator[tuple[str, int, float]]:
        """(path, bytes, age in s) of all files in the line's folder, half-written ones too, that are older than this.

        Ages are by the clock of the file system, which dates the files too. Raises OSError.
        """
        now = self._file_system_time(home)
        for folder, shards, names in os.walk(self.root / home):
            shards.sort()
            for path in (Path(folder) / name for name in names):
                with contextlib.suppress(FileNotFoundError):  # it went while we looked
                    about = path.lstat()
                    if now - about.st_mtime >= seconds:
                        yield str(path.relative_to(self.root)), about.st_size, now - about.st_mtime

    def _file_system_time(self, home: str) -> float:
        probe = self.root / home / f"time-{os.urandom(8).hex()}"
        try:
            _write_flushed(probe, b"")
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    # -- folders -----------------------------------------------------------------------------------------------------

    def make_home(self, home: str) -> None:
        """The line's own folder, new. Raises OSError."""
        (self.root / home).mkdir(0o700)
        flush_folder(self.root)

    def remove_home(self, home: str) -> None:
        """Remove a folder of the line that was made for nothing."""
        with contextlib.suppress(OSError):
            (self.root / home).rmdir()

    def has_home(self, home: str) -> bool:
        """Whether this process can look into the line's folder; listed, for NFS answers other questions from memory."""
        with contextlib.suppress(OSError):
            if home in os.listdir(self.root):
                os.listdir(self.root / home)
                return True
        return False

    def check(self) -> float:
        """Seconds that a small file took to be written and flushed. Raises ConfigError, a sentence.

        A full folder is no fault here: what lies in it must still be read, and removed.
        """
        if not self.root.is_dir():
            raise ConfigError(
                f"payload.dir is {self.root}, and there is no such folder on this machine: make it, on a file system "
                "that all machines of the line share, or mount that file system here"
            )
        probe = self.root / f".probe-{os.urandom(8).hex()}"
        began = time.perf_counter()
        try:
            _write_flushed(probe, b"x" * 4096)
        except OSError as error:
            if error.errno not in FULL:
                raise ConfigError(
                    f"payload.dir is {self.root}, and this process can't write there ({error.strerror}): give its user "
                    "the right to, or name another folder"
                ) from None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return time.perf_counter() - began

    def why(self, reference: Reference, error: OSError) -> EnvelopeError | PayloadFilesAway:
        """Whether the payload is lost, or this machine can't read it."""
        if not self.on:
            return PayloadFolderAway(
                f"the payload lies in the file {reference.path} and payload.dir is not set here: set it as it is on "
                "the machines that write there"
            )
        here = self.has_home(reference.path.partition("/")[0])
        if here and isinstance(error, FileNotFoundError):
            return EnvelopeError(f"the payload file {reference.path} is not there any more (in {self.root})")
        return (PayloadFilesAway if here else PayloadFolderAway)(
            f"the payload file {reference.path} can't be read on this machine ({error.strerror or error}; payload.dir "
            f"is {self.root}): is the line's file system mounted there, and does this user own the files?"
        )


def _write_flushed(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
