"""The folder that images are unpacked into: one entry each, built once, held while in use, the oldest evicted.

    CACHE/images/DIGEST/rootfs       the unpacked image
    CACHE/images/DIGEST/image.json   where it came from, its size, the binds that it needs
    CACHE/names/*.json               a name (or URL) -> the digest that it stands for on this machine
    CACHE/seen/*.json                a file's path, size, times -> its sha256, so that a big SIF is read once
    CACHE/locks/DIGEST               shared lock: in use; its time: last use
    CACHE/locks/*.build              exclusive lock: somebody builds
    CACHE/staging/*                  half-made entries, named like their build lock; whoever gets the lock removes them

An entry appears by one rename and goes by one rename, so what is there is whole. Locks are the kernel's (flock): they
end with the processes that hold them, however these end.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from pipeline.config import Config
from pipeline.errors import ConfigError, SandboxError
from workers.sandbox.boxes.layout import remove
from workers.sandbox.images.files import SHARED_DISKS, filesystem, key_of, read_json
from workers.sandbox.locks import locked, tried

log = logging.getLogger(__name__)
FOLDERS = ("images", "names", "seen", "locks", "staging")


@dataclass(frozen=True, slots=True)
class Image:
    """A folder to start sandboxes from. `binds`: values for `--bind` that it needs. `lock`: what `hold` holds."""

    path: Path
    digest: str
    binds: tuple[str, ...] = ()
    lock: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What `image.json` says. `size` in bytes on disk, `built` Unix time; `kind`: recipe, sif, pulled, derived."""

    digest: str
    kind: str
    source: str
    size: int
    built: float
    binds: list[str]


def folders_under(image: Image, home: str) -> list[str]:
    """Folders (relative) that a home which is bound at `home` must have, so that the image's binds can go over it.

    Apptainer makes mount points in the image but not deep in what is bound over it.
    """
    places = [PurePosixPath(bind.split(":")[1]) for bind in image.binds]
    return [str(place.relative_to(home)) for place in places if place.is_relative_to(home)]


class Hold:
    """An image in use: it is not evicted until `close` (safe twice) or the end of this process."""

    def __init__(self, lock: int | None) -> None:
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def hold(image: Image) -> Hold:
    """Keep the image while a sandbox uses it. Raises SandboxError when it was evicted since it was resolved."""
    if image.lock is None:
        return Hold(None)
    lock = os.open(image.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)  # an evictor holds it for one rename only
    if image.path.is_dir():
        os.utime(lock)
        return Hold(lock)
    os.close(lock)
    raise SandboxError(f"the image {image.path} was evicted just now: resolve its name again")


def cache_folder(config: Config) -> Path:
    """`images.cache`, else a folder of this user's in the temporary directory; it need not be there yet."""
    named = config.images.cache
    return config.path_of(named) if named else Path(tempfile.gettempdir()) / f"rollout-images-{os.getuid()}"


class Cache:
    """One cache folder. Made, checked and warned about at the first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, config: Config) -> Cache:
        """The cache that the settings name. Raises ConfigError for a folder that can't be used."""
        folder = cache_folder(config)
        known = _OPENED.get(folder)
        if known is not None and (folder / FOLDERS[-1]).is_dir():
            return known
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not config.images.cache:
                _check_private(folder)
            _OPENED[folder] = cls(folder)
        except OSError as error:
            raise ConfigError(f"images.cache: {folder} can't be used: {error.strerror}; name another folder") from None
        kind = filesystem(folder)
        if kind.startswith(SHARED_DISKS):
            log.warning(
                "images.cache: %s lies on %s, which other machines share: set images.cache to a folder on a local disk",
                folder, kind,
            )  # fmt: skip
        return _OPENED[folder]

    def image(self, digest: str) -> Image | None:
        """The entry as an image, marked as used now; None where there is none."""
        entry = self.entry(digest)
        if entry is None:
            return None
        lock = self.folder / "locks" / digest
        lock.touch(mode=0o600)
        return Image(self.folder / "images" / digest / "rootfs", digest, tuple(entry.binds), lock)

    def entry(self, digest: str) -> Entry | None:
        found = read_json(self.folder / "images" / digest / "image.json")
        return Entry(**found) if found else None

    def entries(self) -> list[Entry]:
        """All entries, the latest used first."""
        found = [self.entry(folder.name) for folder in (self.folder / "images").iterdir()]
        return sorted((entry for entry in found if entry), key=lambda entry: -self.last_used(entry.digest))

    def last_used(self, digest: str) -> float:
        """Unix time; 0 if never."""
        with suppress(FileNotFoundError):
            return (self.folder / "locks" / digest).stat().st_mtime
        return 0.0

    def in_use(self, digest: str) -> bool:
        """Whether somebody holds it (which may change the next moment)."""
        with tried(self.folder / "locks" / digest) as free:
            return not free

    def digest_of(self, name: str) -> str | None:
        """What a name stands for here, if its entry is still there."""
        found = read_json(self._name_file(name))
        return found["digest"] if found and self.entry(found["digest"]) else None

    def names(self) -> dict[str, str]:
        """Every name -> its digest; names of evicted entries are left out."""
        found = [read_json(path) for path in (self.folder / "names").glob("*.json")]
        return {item["name"]: item["digest"] for item in found if item and self.entry(item["digest"])}

    def give_name(self, name: str, digest: str) -> None:
        """Let a name stand for this entry; what it stood for before stays, without it, and the log says so."""
        before = self.digest_of(name)
        if before not in (None, digest):
            log.info("%s stands for the image %.12s now; before, it was %.12s", name, digest, before)
        self._write(self._name_file(name), {"name": name, "digest": digest})

    def remember(self, path: Path, facts: dict[str, Any]) -> None:
        """Keep what was found out about a file of somebody else's."""
        self._write(self.folder / "seen" / f"{key_of(str(path))}.json", facts)

    def recall(self, path: Path) -> dict[str, Any]:
        return read_json(self.folder / "seen" / f"{key_of(str(path))}.json")

    def _name_file(self, name: str) -> Path:
        return self.folder / "names" / f"{key_of(name)}.json"

    def _write(self, path: Path, data: dict[str, Any]) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self.folder / "staging", prefix="note.", delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, path)

    @asynccontextmanager
    async def building(self, key: str) -> AsyncIterator[tuple[Path, int]]:
        """The right to build `key`, one process at a time; the others wait.

        Gives an empty staging folder, and the lock's descriptor: a child that builds inherits it, so that the next
        builder starts only when the last writer of a killed one is gone.
        """
        lock = os.open(self.folder / "locks" / f"{key}.build", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        staging = self.folder / "staging" / key
        try:
            # Another process lets go, so no event tells; and a thread that blocks in flock could not be cancelled.
            while not locked(lock):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.to_thread(remove, staging)
            staging.mkdir(mode=0o700)
            try:
                yield staging, lock
            finally:
                await asyncio.shield(asyncio.to_thread(remove, staging))
        finally:
            os.close(lock)

    def publish(self, staging: Path, entry: Entry) -> Image:
        """Make an entry of `staging/rootfs`, in one rename. Call while its build lock is held."""
        ready = staging / "entry"
        ready.mkdir()
        (staging / "rootfs").rename(ready / "rootfs")
        (ready / "image.json").write_text(json.dumps(asdict(entry)))
        (self.folder / "locks" / entry.digest).touch(mode=0o600)
        ready.rename(self.folder / "images" / entry.digest)
        image = self.image(entry.digest)
        if image is None:
            raise SandboxError(f"the image {entry.digest} vanished from {self.folder} while it was built: try again")
        return image

    def evict(self, digest: str) -> bool:
        """Remove an entry; False when it is in use, or gone already."""
        with tried(self.folder / "locks" / digest) as free:
            if not free:
                return False
            gone = Path(tempfile.mkdtemp(prefix="gone.", dir=self.folder / "staging"))
            try:
                (self.folder / "images" / digest).rename(gone / "entry")
            except FileNotFoundError:
                gone.rmdir()
                return False
        remove(gone)
        return True

    def tidy(self) -> None:
        """Remove what killed builders and evictors left behind. A tree that is just being removed is no harm."""
        for left in (self.folder / "staging").iterdir():
            if left.name.startswith(("gone.", "note.")):
                with suppress(FileNotFoundError):
                    if time.time() - left.stat().st_mtime > 60.0:  # else: its maker is at work on it
                        remove(left)
                continue
            with tried(self.folder / "locks" / f"{left.name}.build") as free:
                if free:
                    remove(left)


_OPENED: dict[Path, Cache] = {}


def _check_private(folder: Path) -> None:
    """A folder in the temporary directory may have been put there by somebody else."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"images.cache is empty and {folder} is not a private folder of ours (owner {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):o}): remove it, or set images.cache to another folder"
        )
