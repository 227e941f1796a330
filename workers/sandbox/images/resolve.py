"""From a name to an image that is on this machine's disk: recipe, cached name, SIF, folder, or a registry's URL."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import os
import re
import time
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import HandlerError, SandboxError
from workers.sandbox.images import build, recipes
from workers.sandbox.images.cache import Cache, Image
from workers.sandbox.images.files import key_of
from workers.sandbox.images.steps import apptainer, step

URL = re.compile(r"^(docker|oras|library|shub|https?)://")
ARCHIVE = re.compile(r"^(docker-archive|oci-archive|oci):")
PACKED = ("oras://", "library://", "shub://", "http://", "https://")
"""What a registry keeps as a SIF: pulled as a file, so that its content names it. The rest is built from layers."""


async def resolve(config: Config, name: str) -> Image:
    """The image that `name` stands for, built, unpacked or pulled if this machine does not have it yet.

    `name`: a recipe (`host`, `debian`, `python`), a name from `rollout image build|pull`, the path of a SIF or of an
    unpacked image's folder (a relative one starts at the config's folder), or a URL (`docker://`, `oras://`,
    `library://`, `oci-archive:FILE`, ...). Raises HandlerError for what names no image, SandboxError for what could
    not be made here and now.
    """
    try:
        return await _resolve(Cache.of(config), config, name)
    except OSError as error:  # a full disk, a file that may not be read
        raise SandboxError(f"the image {name!r} can't be used here: {error}") from error


async def _resolve(cache: Cache, config: Config, name: str) -> Image:
    if not name:
        raise HandlerError("the image has no name: set sandbox.image, or `image` in the handler's `sandbox`")
    known = cache.digest_of(name)
    image = cache.image(known) if known else None
    if image is not None:
        return image
    if name in recipes.names():
        return await build.from_recipe(cache, name, recipes.render(name))
    if pullable(name):
        return await pull(cache, name)
    if "/" in name or name.startswith(("~", ".")) or name.endswith(".sif"):
        return await _from_path(cache, config.path_of(name))
    raise HandlerError(_unknown(cache, name))


def pullable(name: str) -> bool:
    """Whether a name is a registry's URL or an archive."""
    return bool(URL.match(name) or ARCHIVE.match(name))


def _unknown(cache: Cache, name: str) -> str:
    there = sorted({*recipes.names(), *cache.names()})
    near = difflib.get_close_matches(name, there, n=1)
    meant = f": did you mean {near[0]!r}?" if near else ""
    return (
        f"there is no image {name!r} on this machine{meant} (there are: {', '.join(there)}; a path of a .sif or of a "
        f"folder works too, it has a / in it). `rollout image build {name} --from IMAGE --script FILE` makes one of "
        "this name"
    )


async def _from_path(cache: Cache, path: Path) -> Image:
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        there = sorted(item.name for item in path.parent.glob("*.sif")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        raise HandlerError(
            f"there is no image at {path}" + (f": did you mean {path.with_name(near[0])}?" if near else "")
        )
    if not _is_sif(path):
        raise HandlerError(f"{path} is no SIF: give a .sif that Apptainer built, or an unpacked image's folder")
    return await build.unpacked(cache, path, await digest_of_file(cache, path))


def _is_sif(path: Path) -> bool:
    """By its head: a launch line of 32 bytes, then the magic word."""
    with open(path, "rb") as file:
        return b"SIF_MAGIC" in file.read(64)


def _folder(path: Path) -> Image:
    """A folder of the user's, used in place. Its digest names the folder and what stands at its top, not all of it."""
    if not any((path / name).exists() or (path / name).is_symlink() for name in ("bin", "usr/bin")):
        raise HandlerError(f"the folder {path} is no image: it has neither bin nor usr/bin")
    top = path.stat()
    facts = [str(path), top.st_dev, top.st_ino, top.st_mtime_ns]
    facts += sorted((item.name, item.stat(follow_symlinks=False).st_mtime_ns) for item in os.scandir(path))
    return Image(path, hashlib.sha256(repr(facts).encode()).hexdigest())


async def digest_of_file(cache: Cache, path: Path) -> str:
    """sha256 of a file. It is read once: as long as path, size, times and inode stay, the note is believed."""
    facts = _facts(path)
    known = cache.recall(path)
    if known.get("facts") == facts:
        return str(known["digest"])
    async with cache.building(f"hash-{key_of(str(path))}"):
        known = cache.recall(path)
        if known.get("facts") == facts:
            return str(known["digest"])
        digest = await asyncio.to_thread(_sha256, path)
        if _facts(path) != facts:
            raise SandboxError(f"{path} was written to while it was read: try again when it is complete")
        cache.remember(path, {"path": str(path), "facts": facts, "digest": digest})
        return digest


def _facts(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def pull(cache: Cache, url: str, *, name: str = "", again: bool = False) -> Image:
    """An image from a registry or an archive, known from then on by its URL and by `name`. `again`: also if it is here.

    Raises SandboxError with Apptainer's own words when the registry does not give it.
    """
    apptainer()
    known = None if again else cache.digest_of(url)
    image = cache.image(known) if known else None
    if image is None:
        async with cache.building(f"pull-{key_of(url)}") as (staging, lock):
            known = None if again else cache.digest_of(url)
            image = (cache.image(known) if known else None) or await _fetch(cache, url, staging, lock)
            cache.give_name(url, image.digest)
    if name:
        cache.give_name(name, image.digest)
    return image


async def _fetch(cache: Cache, url: str, staging: Path, lock: int) -> Image:
    if url.startswith(PACKED):
        file = staging / "image.sif"
        command = ["pull", str(file), url]
        await step(f"pulling {url}", command, scratch=staging, lock=lock, registry=True, mend=build.UNREACHED)
        digest = await asyncio.to_thread(_sha256, file)
        return await build.once(cache, digest, "pulled", url, lambda at, held: build.unpack_into(at, str(file), held))
    archive = ARCHIVE.match(url)
    path = Path(url[archive.end() :].partition(":")[0]) if archive else None
    if path is not None and not path.exists():
        raise HandlerError(f"{url}: there is no file {path}")
    # Layers have no digest that Apptainer tells: an archive is named by its content, a tag by the moment of its pull.
    content = await digest_of_file(cache, path) if path is not None and path.is_file() else str(time.time_ns())
    digest = hashlib.sha256(f"{url}\n{content}".encode()).hexdigest()

    async def layers(at: Path, held: int) -> None:
        await build.unpack_into(at, url, held, registry=True)

    return await build.once(cache, digest, "pulled", url, layers)
