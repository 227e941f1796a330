"""Sessions for tests: the tools over a live box of each driver, and processes found by a word of one test's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from pipeline.config import Config
from tests.boxes import Site, image_cache, short_root, site
from workers.sandbox.box import Box, Spec
from workers.sandbox.tools.session import Session

__all__ = [
    "DRIVERS",
    "boxed",
    "either",
    "gone",
    "image_cache",
    "make",
    "running",
    "session",
    "short_root",
    "site",
    "unique",
]

DRIVERS = ("local", "bubblewrap", "apptainer")


async def make(site: Site, kind: str, name: str = "g.0-token", **changes: Any) -> tuple[Session, Box]:
    """A session over a new box; `changes` are settings of section `sandbox`. The site discards the box."""
    box = await site.box(kind, Spec(files={"a/b.txt": "hi\n"}), name=name)
    settings = {f"sandbox.{key}": value for key, value in {"command_timeout": 20.0, **changes}.items()}
    return Session(box, Config().changed(settings).sandbox), box


@contextlib.asynccontextmanager
async def started(site: Site, kind: str) -> AsyncIterator[Session]:
    made, _ = await make(site, kind)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(params=DRIVERS)
async def session(site: Site, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """A started session, once for each driver; the home holds `a/b.txt` with "hi"."""
    async with started(site, request.param) as made:
        yield made


@pytest.fixture(params=["local", "apptainer"])
async def either(site: Site, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """A started session without and with namespaces, for what does not depend on how these are made."""
    async with started(site, request.param) as made:
        yield made


@pytest.fixture
async def boxed(site: Site) -> AsyncIterator[Session]:
    """A started session in a box of bubblewrap, for what does not depend on the driver."""
    async with started(site, "bubblewrap") as made:
        yield made


def unique(seconds: int) -> str:
    """A length for `sleep` that only this test uses, however many runs share the machine."""
    return f"{seconds}.{os.getpid()}{secrets.randbelow(10**6)}"


def running(word: str) -> list[int]:
    """Pids of living processes with `word` among their arguments."""
    found = psutil.process_iter(["cmdline", "status"])
    return [p.pid for p in found if word in (p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE]


async def gone(word: str, seconds: float = 5.0) -> bool:
    """Whether no process with `word` lives any more, at the latest after `seconds`."""
    until = time.monotonic() + seconds
    while running(word) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return not running(word)
