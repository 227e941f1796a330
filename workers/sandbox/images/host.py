"""The recipe `host`: a skeleton of empty folders over which this machine's /usr and interpreter are bound, read-only.

It is made in milliseconds, without a network and without a build tool, and holds what the machine itself can run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from functools import cache
from pathlib import Path

from workers.sandbox.boxes.environment import PATH
from workers.sandbox.boxes.machine import FROM_ETC, MERGED, accounts

log = logging.getLogger(__name__)

FOLDERS = (
    "dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "run/rollout", "srv", "sys", "tmp", "usr", "var",
    "var/cache", "var/lib", "var/log", "var/tmp",
)  # fmt: skip
FILES = {
    **{f"etc/{name}": text for name, text in accounts("/root").items()},
    "etc/resolv.conf": "",
    "etc/shells": "/bin/sh\n/bin/bash\n",
    "etc/profile": f"export PATH={PATH}\n",
}


def binds() -> tuple[str, ...]:
    """What the skeleton needs bound over it, as values for `--bind`."""
    wanted = ["/usr", *(f"/{name}" for name in MERGED if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"))]
    wanted += [f"/etc/{name}" for name in FROM_ETC if os.path.exists(f"/etc/{name}") and not _into_usr(f"/etc/{name}")]
    for prefix in (sys.base_prefix, sys.prefix):
        if not any(Path(prefix).is_relative_to(place) for place in wanted):
            wanted.append(prefix)
    return tuple(f"{place}:{place}:ro" for place in wanted if _bindable(place))


def _into_usr(path: str) -> bool:
    """A link into /usr is copied as a link: Apptainer would bind what it points to at a place that is a link."""
    return os.path.islink(path) and os.path.realpath(path).startswith("/usr/")


def _bindable(place: str) -> bool:
    if "," in place or ":" in place:
        log.warning("%s is not there in sandboxes of the image `host`: its path has a comma or a colon", place)
        return False
    return os.path.isdir(place) or os.path.isfile(place)


def manifest() -> dict[str, str | None]:
    """Relative path -> a file's text, `-> TARGET` for a link, None for a folder."""
    made: dict[str, str | None] = dict.fromkeys(FOLDERS)
    made |= {name: f"-> {os.readlink(f'/{name}')}" for name in MERGED if os.path.islink(f"/{name}")}
    for name in FROM_ETC:
        if os.path.exists(f"/etc/{name}") and _into_usr(f"/etc/{name}"):
            made[f"etc/{name}"] = f"-> {os.path.realpath(f'/etc/{name}')}"
    for bind in binds():  # mount points
        place = bind.partition(":")[0].lstrip("/")
        made[place] = None if os.path.isdir(f"/{place}") else ""
    return made | FILES


@cache
def digest() -> str:
    """Changes when this machine or its interpreter would give another skeleton; looked at once a process."""
    text = repr((sorted(manifest().items(), key=lambda item: item[0]), binds()))
    return hashlib.sha256(text.encode()).hexdigest()


def make(rootfs: Path) -> None:
    """Write the skeleton into the empty folder `rootfs`."""
    for name, content in manifest().items():
        place = rootfs / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            place.mkdir(parents=True, exist_ok=True)
        elif content.startswith("-> "):
            place.symlink_to(content[3:])
        else:
            place.write_text(content)
    for name in ("tmp", "var/tmp"):
        (rootfs / name).chmod(0o1777)
