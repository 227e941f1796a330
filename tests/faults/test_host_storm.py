"""Hosts that are killed while they make and discard sandboxes: nothing stays behind, and a neighbour feels nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.boxes import PROGRAMS
from tests.faults.tools import ROOT
from tests.services import require
from workers.sandbox.boxes import orphans
from workers.sandbox.processes import MARK


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder)


def start(settings: dict[str, object], log: Path, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.faults.host_main", json.dumps(settings), str(log), str(count)]
    with open(log.with_suffix(".err"), "ab") as said:
        return subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, stdin=subprocess.DEVNULL)


def lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


async def grown(log: Path, by: int, seconds: float = 60.0) -> None:
    """Wait until the host that writes `log` has got on by so many lines."""
    before, until = lines(log), time.monotonic() + seconds
    while lines(log) < before + by:
        said = log.with_suffix(".err").read_text("utf-8", "replace")[-2000:]
        assert time.monotonic() < until, f"{log.name} stands still at {before}: {said}"
        await asyncio.sleep(0.05)


def marked(place: Path) -> list[str]:
    """Command lines of living processes whose environment names a sandbox under `place`."""
    found = []
    for process in psutil.process_iter(["status", "cmdline"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and str(place) in process.environ().get(MARK, ""):
                found.append(" ".join(process.info["cmdline"]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def mounts(place: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(place) in line]


async def storm(driver: str, place: Path, cycles: int, seed: int) -> None:
    for program in PROGRAMS[driver]:
        require(program)
    chance = random.Random(seed)
    settings: dict[str, object] = {
        "sandbox.driver": driver, "sandbox.root": str(place / "s"), "sandbox.max_live": 16,
        "images.cache": str(place / "images"),
    }  # fmt: skip
    log, sibling_log = place / "cycles", place / "sibling"
    sibling = start(settings, sibling_log, 0)
    host = start(settings, log, 4)
    try:
        await grown(sibling_log, 1)
        while lines(log) < cycles:
            await grown(log, 1)
            await asyncio.sleep(chance.uniform(0.0, 0.6))
            host.kill()
            host.wait()
            await grown(sibling_log, 2)
            host = start(settings, log, 4)
        host.kill()
        host.wait()
        (parent,) = (place / "s").iterdir()
        async with asyncio.timeout(60):  # processes that were being killed may take a moment
            while len(list(parent.iterdir())) > 1:
                await asyncio.to_thread(orphans.sweep, parent)
                await asyncio.sleep(0.2)
        await grown(sibling_log, 2)
        assert sibling.poll() is None
    finally:
        for process in (host, sibling):
            process.kill()
            process.wait()
    await asyncio.to_thread(orphans.sweep, parent)
    async with asyncio.timeout(20):
        while marked(place):
            await asyncio.sleep(0.1)
    assert list(parent.iterdir()) == []
    assert mounts(place / "s") == []
    assert "AssertionError" not in log.with_suffix(".err").read_text() + sibling_log.with_suffix(".err").read_text()


@pytest.mark.ci
@pytest.mark.parametrize("driver", ["local", "bubblewrap", "apptainer"])
async def test_killed_hosts_leave_nothing(driver: str, place: Path) -> None:
    await storm(driver, place, 24, seed=os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("driver", ["apptainer"])
async def test_a_thousand_cycles_leave_nothing(driver: str, place: Path) -> None:
    await storm(driver, place, 1000, seed=7)
