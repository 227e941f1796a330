"""A Redis that may move, for tests: `rollout redis start --foreground --publish` as processes on one folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from pipeline import address_file
from pipeline.address_file import Address
from pipeline.config import Config
from pipeline.errors import RedisUnavailable
from tests.waiting import until

ROOT = Path(__file__).parents[1]
LEASE = 4.0
"""Seconds of the folder's lock; a successor waits that long, and half of it is what a loaded machine may sleep."""


class Keepers:
    """Processes that keep the Redis of one line's folder, all ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / address_file.NAME
        self.all: list[subprocess.Popen[bytes]] = []

    @property
    def settings(self) -> dict[str, Any]:
        """Of whoever uses this Redis."""
        return {"redis.url": "", "redis.password_file": "", "slurm.folder": str(self.folder), "slurm.lock": LEASE}

    @property
    def config(self) -> Config:
        return Config().changed(self.settings)

    def environment(self, **more: str) -> dict[str, str]:
        """Of a `rollout` command that uses this Redis."""
        settings = {"ROLLOUT_SLURM__FOLDER": str(self.folder), "ROLLOUT_SLURM__LOCK": str(LEASE)}
        return {**os.environ, **settings, "PYTHONPATH": str(ROOT), **more}

    def rollout(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A `rollout` command, to its end."""
        line = [sys.executable, "-m", "workers.cli", *command]
        return subprocess.run(
            line, env=self.environment(**more), cwd=self.folder.parent, capture_output=True, text=True, timeout=60
        )

    def start(self, *options: str, **more: str) -> subprocess.Popen[bytes]:
        """One more keeper; it waits while another one lives."""
        command = [
            sys.executable,
            "-m",
            "workers.cli",
            "redis",
            "start",
            "--foreground",
            "--publish",
            "--bind",
            "127.0.0.1",
        ]
        with open(self.log(len(self.all)), "wb") as log:
            process = subprocess.Popen(
                [*command, *options], env=self.environment(**more), cwd=self.folder.parent, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.all.append(process)
        return process

    def started(self, *options: str) -> subprocess.Popen[bytes]:
        """One more, which has published its server's address."""
        before = self.epoch()
        process = self.start(*options)
        self.published(before)
        return process

    def published(self, after: int, seconds: float = 30.0) -> Address:
        """The address, as soon as there is one with an epoch above `after`."""
        until(lambda: self.epoch() > after, seconds)
        return address_file.read(self.file)

    def epoch(self) -> int:
        try:
            return address_file.read(self.file).epoch
        except RedisUnavailable:
            return 0

    def log(self, number: int) -> Path:
        return self.folder.parent / f"keeper-{number}.log"

    def logs(self) -> str:
        return "".join(self.log(number).read_text("utf-8", "replace") for number in range(len(self.all)))

    def stop(self) -> None:
        """End all, in good order where that works."""
        for process in self.all:
            if process.poll() is None:
                for one in family(process):
                    with contextlib.suppress(psutil.Error):
                        one.resume()
                process.terminate()
        for process in self.all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def family(keeper: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The keeper, the guard of its server, the server."""
    try:
        one = psutil.Process(keeper.pid)
        return [one, *one.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def freeze(keeper: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All of a keeper's processes stand still, as a job that is suspended."""
    found = family(keeper)
    for one in found:
        one.suspend()
    return found


def thaw(processes: list[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            os.kill(one.pid, signal.SIGCONT)


@contextlib.contextmanager
def keepers(folder: Path) -> Iterator[Keepers]:
    """On `folder`/line."""
    found = Keepers(folder / "line")
    try:
        yield found
    finally:
        found.stop()
