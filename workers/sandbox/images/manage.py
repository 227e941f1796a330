"""What people and the maintenance plane do with images: build under a name, list, prefetch, evict."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import HandlerError, LineError
from workers.sandbox.images import build, recipes
from workers.sandbox.images.cache import Cache, Entry, Image
from workers.sandbox.images.resolve import resolve

GB = 10**9
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One entry of the cache. `size` in bytes, `built` and `used` Unix times; `names` may be empty.

    `pinned`: the settings name it (`sandbox.image`, `images.prefetch`), so it is not evicted for room.
    """

    names: list[str]
    kind: str
    source: str
    size: int
    digest: str
    built: float
    used: float
    pinned: bool
    in_use: bool


@dataclass(slots=True)
class Evicted:
    """What an eviction did: digests that went and what each was called, bytes that came free, names in use."""

    digests: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    freed: int = 0
    in_use: list[str] = field(default_factory=list)


def check_name(name: str) -> None:
    """Raises HandlerError for a name that would hide a recipe or look like a path."""
    if name in recipes.names():
        raise HandlerError(f"{name} is a recipe's name: give the image another one")
    if not NAME.match(name) or name.endswith(".sif"):
        raise HandlerError(f"{name!r} is no name for an image: letters, digits, . _ - and no .sif at the end")


async def build_named(
    config: Config, name: str, *, base: str = "", script: str = "", given: Mapping[str, str], again: bool = False
) -> Image:
    """Build the recipe `name`; or, from the image or recipe `base` with a script of extra steps, the image `name`.

    `given`: parameters of the recipe. `again` builds anew what is there; sandboxes that run keep the old one. Raises
    HandlerError, SandboxError.
    """
    cache, nonce = Cache.of(config), str(time.time_ns()) if again else ""
    if not base:
        image = await build.from_recipe(cache, name, recipes.render(name, given), nonce)
        if (given or again) and name != "host":  # the skeleton follows the machine, not a name
            cache.give_name(name, image.digest)
        return image
    check_name(name)
    if given and base not in recipes.names():
        raise HandlerError(f"parameters are for recipes, and {base!r} is none (recipes: {', '.join(recipes.names())})")
    image = await build.from_recipe(cache, base, recipes.render(base, given)) if given else await resolve(config, base)
    if script:
        image = await build.derived(cache, image, script, f"{base} and a script", nonce)
    if image.lock is None:
        raise HandlerError(f"{base} is a folder, which is used in place: give a script, or use it by its path")
    cache.give_name(name, image.digest)
    return image


def listed(config: Config) -> list[Listed]:
    """The cache's entries, the latest used first."""
    cache = Cache.of(config)
    names = _names_by_digest(cache)
    wanted = {config.sandbox.image, *config.images.prefetch}
    return [_listed(config, cache, entry, names.get(entry.digest, []), wanted) for entry in cache.entries()]


def _listed(config: Config, cache: Cache, entry: Entry, names: list[str], wanted: set[str]) -> Listed:
    return Listed(
        names=names, kind=entry.kind, source=entry.source, size=entry.size, digest=entry.digest, built=entry.built,
        used=cache.last_used(entry.digest), in_use=cache.in_use(entry.digest),
        pinned=any(_is(config, entry, names, name) for name in wanted),
    )  # fmt: skip


def _is(config: Config, entry: Entry | Listed, names: Sequence[str], name: str) -> bool:
    """Whether `name` means this entry: a name, a recipe, a URL, a SIF's path, the beginning of its digest."""
    digest = len(name) >= 8 and entry.digest.startswith(name)
    return digest or name in names or entry.source in {name, str(config.path_of(name)) if name else ""}


def _names_by_digest(cache: Cache) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, digest in sorted(cache.names().items()):
        found.setdefault(digest, []).append(name)
    return found


async def prefetch(config: Config, names: Sequence[str] = ()) -> dict[str, str]:
    """Resolve the images (those of `images.prefetch` unless named): name -> "" or the sentence why it failed."""
    found: dict[str, str] = {}
    for name in names or config.images.prefetch:
        try:
            await resolve(config, name)
            found[name] = ""
        except LineError as error:
            found[name] = str(error)
    return found


def evict(config: Config, names: Sequence[str] = (), *, everything: bool = False) -> Evicted:
    """Remove the named images, all that are not in use, or the longest unused ones above `images.keep_gb`.

    One that is in use stays, whatever was asked. Raises HandlerError for a name that no entry has.
    """
    cache, done = Cache.of(config), Evicted()
    cache.tidy()
    there = listed(config)
    for image in _chosen(config, there, names, everything):
        if cache.evict(image.digest):
            done.digests.append(image.digest)
            done.names.append(_called(image))
            done.freed += image.size
        elif cache.entry(image.digest):
            done.in_use.append(_called(image))
    return done


def _called(image: Listed) -> str:
    return f"{', '.join(image.names) or image.source} ({image.digest[:12]})"


def _chosen(config: Config, there: list[Listed], names: Sequence[str], everything: bool) -> list[Listed]:
    if everything:
        return there
    if not names:
        return _above(there, config.images.keep_gb * GB)
    found: list[Listed] = []
    for name in names:
        meant = [image for image in there if _is(config, image, image.names, name)]
        if not meant:
            raise HandlerError(
                f"there is no image {name!r} in {Cache.of(config).folder}: `rollout image ls` lists them"
            )
        found += [image for image in meant if image not in found]
    return found


def _above(there: list[Listed], most: float) -> list[Listed]:
    """The longest unused ones that have to go so that the rest is at most `most` bytes."""
    total, chosen = sum(image.size for image in there), []
    for image in reversed(there):
        if total > most and not image.pinned and not image.in_use:
            chosen.append(image)
            total -= image.size
    return chosen


def read_script(path: Path) -> str:
    """The text of a script of extra steps. Raises HandlerError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HandlerError(f"the script {path} can't be read: {error}") from None
