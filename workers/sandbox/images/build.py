"""The ways to an entry in the cache: a recipe, a SIF unpacked, something pulled, a base with a script run in it."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pipeline.errors import HandlerError, SandboxError
from workers.sandbox.images import host, trees
from workers.sandbox.images.cache import Cache, Entry, Image
from workers.sandbox.images.recipes import Recipe, own_suite
from workers.sandbox.images.steps import apptainer, need, step

Maker = Callable[[Path, int], Awaitable[None]]
"""Fills `STAGING/rootfs`; the second argument is the build lock, for children to inherit."""

SETUP = ".rollout-setup"
"""Folder at the image's root from which a script of extra steps runs; it is removed afterwards."""


UNREACHED = " (is the address right, and does this machine reach the registry? A SIF from another machine works too)"


async def once(cache: Cache, digest: str, kind: str, source: str, make: Maker, binds: tuple[str, ...] = ()) -> Image:
    """The entry `digest`, made now if it is not there; while another process makes it, this one waits."""
    image = cache.image(digest)
    if image is not None:
        return image
    async with cache.building(digest) as (staging, lock):
        image = cache.image(digest)
        if image is not None:
            return image
        await make(staging, lock)
        size = await asyncio.to_thread(trees.size, staging / "rootfs")
        entry = Entry(digest=digest, kind=kind, source=source, size=size, built=time.time(), binds=list(binds))
        return cache.publish(staging, entry)


async def from_recipe(cache: Cache, name: str, recipe: Recipe, nonce: str = "") -> Image:
    """What a recipe makes. A `nonce` makes it anew though it is there."""
    if recipe.builder == "host":

        async def skeleton(staging: Path, _: int) -> None:
            (staging / "rootfs").mkdir()
            host.make(staging / "rootfs")

        return await once(cache, host.digest(), "recipe", name, skeleton, host.binds())

    async def debian(staging: Path, lock: int) -> None:
        await _debian(recipe, staging, lock)

    digest = hashlib.sha256(f"{recipe.digest()} {nonce}".encode()).hexdigest() if nonce else recipe.digest()
    return await once(cache, digest, "recipe", name, debian)


async def _debian(recipe: Recipe, staging: Path, lock: int) -> None:
    """Through a tar archive, so that all files are the builder's own and a plain user can remove them again."""
    tool = need(
        "mmdebstrap", "install it (`apt install mmdebstrap`), or build from a SIF: `rollout image build --from`"
    )
    # Its own way for a plain user (--mode=unshare) maps sub-ids alone, which can't enter our private folder.
    prefix = trees.as_root("--mount", "--pid", "--fork", "--kill-child")
    archive = staging / "root.tar"
    options = ["--mode=root", f"--variant={recipe.variant}", f"--include={','.join(recipe.packages)}"]
    await step(
        f"building a Debian {recipe.suite}",
        ["run", *prefix, tool, *options, recipe.suite, str(archive), *_sources(recipe)],
        scratch=staging, lock=lock,
    )  # fmt: skip
    (staging / "rootfs").mkdir()
    unpack = ["tar", "-C", str(staging / "rootfs"), "--no-same-owner", "--exclude=./dev/*", "-xpf", str(archive)]
    await step(f"unpacking a Debian {recipe.suite}", ["run", *unpack], scratch=staging, lock=lock)
    archive.unlink()
    if recipe.script:
        await _run_script(recipe.script, staging, (), lock)


def _sources(recipe: Recipe) -> list[str]:
    """Where packages come from: the named mirror, this machine's own apt configuration, Debian's default."""
    if recipe.mirror:
        return [recipe.mirror]
    if recipe.suite != own_suite():
        return []
    found = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("debian.*"))]
    return [str(path) for path in found if path.is_file() and path.stat().st_size]


async def unpacked(cache: Cache, sif: Path, digest: str) -> Image:
    """A SIF as a folder: that starts in less time than a SIF, and takes a writable layer of the kernel's own."""

    async def unpack(staging: Path, lock: int) -> None:
        await unpack_into(staging, str(sif), lock)

    return await once(cache, digest, "sif", str(sif), unpack)


async def unpack_into(staging: Path, source: str, lock: int, *, registry: bool = False) -> None:
    """`apptainer build --sandbox`, from a file or from whatever else Apptainer builds from."""
    apptainer()
    await step(
        f"unpacking {source}", ["build", str(staging / "rootfs"), source, "--sandbox"],
        scratch=staging, lock=lock, registry=registry, mend=UNREACHED if registry else "",
    )  # fmt: skip
    if not (staging / "rootfs").is_dir():
        raise SandboxError(f"unpacking {source} gave no folder: is it an image?")


async def derived(cache: Cache, base: Image, script: str, source: str, nonce: str = "") -> Image:
    """A copy of `base` in which `script` (sh, as root, with the network) was run."""
    if not script.strip():
        raise HandlerError("the script of extra steps is empty: give one, or use the base by its own name")

    async def make(staging: Path, lock: int) -> None:
        copy = [*trees.as_root(), "cp", "-a", "--reflink=auto", str(base.path), str(staging / "rootfs")]
        await step(f"copying {base.path}", ["run", *copy], scratch=staging, lock=lock)
        await _run_script(script, staging, base.binds, lock)

    digest = hashlib.sha256(f"{base.digest}\n{nonce}\n{script}".encode()).hexdigest()
    return await once(cache, digest, "derived", source, make, base.binds)


async def _run_script(script: str, staging: Path, binds: tuple[str, ...], lock: int) -> None:
    folder = staging / "rootfs" / SETUP
    folder.mkdir()
    (folder / "setup.sh").write_text(script, encoding="utf-8")
    flags = ["--writable", "--fakeroot", "--containall", "--cleanenv", "--no-home", "--pwd", "/", "--workdir"]
    work = staging / "work"
    work.mkdir()
    bound = [word for bind in binds for word in ("--bind", bind)]
    command = [apptainer(), "-q", "exec", *flags, str(work), *bound, str(staging / "rootfs"), "/bin/sh", "-e"]
    await step("the script of extra steps", ["run", *command, f"/{SETUP}/setup.sh"], scratch=staging, lock=lock)
    shutil.rmtree(folder)


async def to_sif(image: Image, file: Path, cache: Cache) -> None:
    """Write an image as a SIF, for other machines. Raises HandlerError when the file is there already."""
    if file.exists():
        raise HandlerError(f"{file} is there already: remove it, or name another file")
    apptainer()
    async with cache.building(f"sif-{image.digest}") as (staging, lock):
        made = staging / "image.sif"
        await step(f"packing {file}", ["build", str(made), str(image.path)], scratch=staging, lock=lock)
        await asyncio.to_thread(shutil.move, made, file)
