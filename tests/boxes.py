"""Boxes for tests: drivers with short roots, commands run inside, processes and mounts counted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from pipeline.config import Config
from tests.services import require
from workers.sandbox import programs
from workers.sandbox.box import Box, Driver, Spec
from workers.sandbox.boxes import make_driver
from workers.sandbox.boxes.apptainer import Apptainer
from workers.sandbox.processes import MARK

ISOLATING = ("bubblewrap", "apptainer")
ALL = ("local", *ISOLATING, "apptainer-instance")
PROGRAMS = {"local": (), "bubblewrap": ("bwrap", "nsenter"), "apptainer": ("apptainer", "nsenter")}


class Done(NamedTuple):
    """How a command inside ended, and what it wrote to stdout and stderr."""

    code: int
    text: str


class Site:
    """One host's folder with drivers in it; what they made is discarded at the end."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self._cache = cache
        self._boxes: list[Box] = []
        self._drivers: dict[tuple[Any, ...], Driver] = {}

    def driver(self, kind: str, **changes: Any) -> Driver:
        """`kind`: a driver's name, or `apptainer-instance`; `changes`: `memory_mb=...` of section `sandbox`."""
        key = kind, *sorted(changes.items())
        name = kind.removesuffix("-instance")
        for program in PROGRAMS[name]:
            require(program)
        if key not in self._drivers:
            settings = {f"sandbox.{setting}": value for setting, value in changes.items()}
            config = Config().changed({"sandbox.driver": name, "images.cache": str(self._cache), **settings})
            self._drivers[key] = (
                Apptainer(config, self.root, way="instance") if name != kind else make_driver(config, self.root)
            )
        return self._drivers[key]

    async def box(self, kind: str, spec: Spec | None = None, name: str = "g.0-token", **changes: Any) -> Box:
        """A live box, discarded after the test."""
        box = await self.driver(kind, **changes).create(spec or Spec(), name)
        self._boxes.append(box)
        return box

    async def close(self) -> None:
        for box in self._boxes:
            await box.discard()


@pytest.fixture(scope="session")
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of images for the whole run."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def short_root() -> Iterator[Path]:
    """A folder with a short path: Unix sockets allow 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="box-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def site(short_root: Path, image_cache: Path) -> AsyncIterator[Site]:
    site = Site(short_root / "host", image_cache)
    yield site
    await site.close()


async def run(box: Box, script: str, *arguments: str, seconds: float = 15.0) -> Done:
    """Run a bash script inside."""
    argv = box.command(["/bin/bash", "-c", script, "bash", *arguments])
    return Done(*await programs.run(argv, seconds=seconds, env=box.environment()))


async def until(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


def marked(root: Path) -> list[str]:
    """Command lines of living processes that belong to a sandbox under `root`."""
    found = []
    for process in psutil.process_iter(["status", "cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.info["status"] != psutil.STATUS_ZOMBIE and str(root) in process.environ().get(MARK, ""):
                found.append(" ".join(process.info["cmdline"]))
    return found
