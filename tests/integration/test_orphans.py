"""H17: a host process is killed with SIGKILL; the next sweep takes away what it left, and nothing of anybody else's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import SandboxError
from tests.boxes import ALL, PROGRAMS, Site, image_cache, run, short_root, site, until
from tests.services import require
from workers.sandbox import processes
from workers.sandbox.boxes import orphans
from workers.sandbox.boxes.orphans import claim_root, sweep
from workers.sandbox.locks import tried
from workers.sandbox.processes import Process

__all__ = ["image_cache", "short_root", "site"]

HOST = """
import asyncio, json, subprocess, sys
from pathlib import Path
from pipeline.config import Config
from workers.sandbox.box import Spec
from workers.sandbox.boxes import make_driver
from workers.sandbox.boxes.apptainer import Apptainer
from workers.sandbox.boxes.orphans import claim_root

async def main(root, kind, cache):
    owner = claim_root(root)
    config = Config().changed({"sandbox.driver": kind.removesuffix("-instance"), "images.cache": cache})
    driver = Apptainer(config, root, way="instance") if kind.endswith("-instance") else make_driver(config, root)
    box = await driver.create(Spec(), "g.0-token")
    script = "setsid sleep 900 & mkdir -p ~/a/b; touch ~/a/b/c; chmod 0 ~/a/b ~/a; touch ~/ready; exec sleep 900"
    running = subprocess.Popen(box.command(["/bin/bash", "-c", script]), env=box.environment(), cwd="/",
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(box.processes()) < 2 or not (box.folder / "home" / "ready").exists():
        await asyncio.sleep(0.02)
    print(json.dumps([*box.processes(), *([box.pid] if box.pid else [])]), flush=True)
    await asyncio.sleep(900)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


class Host:
    """A process of its own that holds a root with one box; `inside`: what runs in that."""

    def __init__(self, root: Path, kind: str, cache: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(root), kind, str(cache)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.inside = [Process(*item) for item in told if isinstance(item, list)]
        self.keeper = next((processes.look(item) for item in told if isinstance(item, int)), None)

    def alive(self) -> list[Process]:
        """What still runs of its box."""
        found = [*self.inside, *([self.keeper] if self.keeper else [])]
        return [item for item in found if (now := processes.look(item.pid)) is not None and now.born == item.born]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def host(short_root: Path, image_cache: Path) -> Iterator[Callable[..., Host]]:
    """Starts hosts under one parent folder; all are killed, and swept, at the end."""
    started: list[Host] = []

    def start(name: str, kind: str) -> Host:
        for program in PROGRAMS[kind.removesuffix("-instance")]:
            require(program)
        started.append(Host(short_root / name, kind, image_cache))
        return started[-1]

    yield start
    for one in started:
        if one.process.returncode is None:
            one.kill()
    sweep(short_root)


@pytest.mark.parametrize("kind", ALL)
async def test_h17_a_killed_host_leaves_nothing_and_its_sibling_is_untouched(
    short_root: Path, host: Callable[..., Host], kind: str
) -> None:
    dead, sibling = await asyncio.gather(asyncio.to_thread(host, "a", kind), asyncio.to_thread(host, "b", kind))
    assert len(dead.alive()) >= 2
    before = sorted(path for path in sibling.root.rglob("*") if not path.is_relative_to(sibling.root / ".aids"))
    assert sweep(short_root) == []
    dead.kill()
    if kind not in ("local", "apptainer-instance"):  # the kernel ends these by itself
        assert await until(lambda: not dead.alive())
    removed = sweep(short_root)
    assert "a" in removed
    assert len([name for name in removed if name.startswith("a/") and not name.startswith("a/.")]) == 1
    assert not dead.alive()
    assert not dead.root.exists()
    assert len(sibling.alive()) >= 2
    assert sorted(path for path in sibling.root.rglob("*") if not path.is_relative_to(sibling.root / ".aids")) == before
    assert sweep(short_root) == []


def test_a_root_has_one_owner_at_a_time(short_root: Path) -> None:
    owner = claim_root(short_root / "a")
    with pytest.raises(SandboxError, match="another living process"):
        claim_root(short_root / "a")
    assert sweep(short_root) == []
    owner.close()
    owner.close()
    claim_root(short_root / "a").close()
    assert sweep(short_root) == ["a"]
    assert sweep(short_root / "missing") == []


def test_half_made_folders_go_too_and_foreign_ones_stay(short_root: Path) -> None:
    claim_root(short_root / "a").close()
    (short_root / "a" / ".part-x" / "home").mkdir(parents=True)
    (short_root / "a" / "0123456789ab").mkdir()
    (short_root / "a" / "0123456789ab" / "keeper").write_bytes(b"\xff not an identity")
    (short_root / "not-ours").mkdir()
    (short_root / "file").write_text("x")
    (short_root / "link").symlink_to(short_root / "not-ours")
    assert sorted(sweep(short_root)) == ["a", "a/.part-x", "a/0123456789ab"]
    assert sorted(path.name for path in short_root.iterdir()) == ["file", "link", "not-ours"]


def test_what_cant_be_removed_does_not_keep_the_rest(short_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        claim_root(short_root / name).close()
        (short_root / name / "0123456789ab").mkdir()

    def end(folder: Path) -> None:
        if folder.parent.name == "a":
            raise subprocess.TimeoutExpired("fusermount", 10)

    monkeypatch.setattr(orphans, "end_all", end)
    assert sweep(short_root) == ["b/0123456789ab", "b"]


def test_a_look_at_a_new_host_does_not_keep_it_from_its_root(short_root: Path) -> None:
    (short_root / "a").mkdir(mode=0o700)
    with tried(short_root / "a" / "owner") as free:
        assert free
        claim = threading.Thread(target=lambda: owners.append(claim_root(short_root / "a")))
        owners: list[orphans.Owner] = []
        claim.start()
        time.sleep(0.05)
    claim.join()
    owners[0].close()


def test_a_reused_pid_dooms_nobody(short_root: Path) -> None:
    """The keeper's record names a pid that is somebody else's by now: born later, or of an earlier boot."""
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        line = processes.identity(bystander.pid)
        boot, space, pid, born = line.split()
        assert processes.identified(line) == processes.look(bystander.pid)
        for stale in (f"{boot} {space} {pid} {int(born) - 1}", f"{boot[::-1]} {space} {pid} {born}",
                      f"{boot} 1 {pid} {born}", f"{pid} {born}", pid, "", f"{boot} {space} -1 {born}"):  # fmt: skip
            assert processes.identified(stale) is None
            claim_root(short_root / "a").close()
            (short_root / "a" / "0123456789ab").mkdir()
            (short_root / "a" / "0123456789ab" / "keeper").write_text(stale)
            assert "a" in sweep(short_root)
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_living_owner_is_told_by_its_lock_not_by_its_pid(short_root: Path) -> None:
    """A dead host's pid that lives again as another process does not protect its folder."""
    claim_root(short_root / "a").close()
    (short_root / "a" / "owner").write_text(processes.identity(os.getpid()))
    assert sweep(short_root) == ["a"]


async def test_a_mark_alone_ends_what_lost_its_parent(short_root: Path, site: Site) -> None:
    owner = claim_root(short_root / "dead")
    folder = short_root / "dead" / "0123456789ab"
    folder.mkdir()
    marked, other = (
        subprocess.Popen(
            ["sleep", "600"], env={"PATH": os.environ["PATH"], processes.MARK: mark}, start_new_session=True
        )
        for mark in (str(folder), f"{folder}x")
    )
    owner.close()
    try:
        sweep(short_root)
        assert marked.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_files_of_subordinate_ids_are_removed(site: Site) -> None:
    """Root inside gave files to other users, and took all rights away from folders."""
    box = await site.box("apptainer")
    script = "mkdir -p ~/deep/er /opt/x; touch ~/deep/er/f /opt/x/f; chown -R 1000:1000 ~/deep /opt/x"
    done = await run(box, f"{script} && chmod 0 ~/deep/er ~/deep /opt/x")
    assert done.code == 0
    owners = {path.lstat().st_uid for path in box.folder.rglob("*")}
    assert len(owners) > 1 or os.getuid() != 0
    await box.discard()
    assert not box.folder.exists()
