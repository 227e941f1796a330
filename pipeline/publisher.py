"""Keeps the Redis of a line that may move: holds the folder's lock, runs the server, publishes where it is.

In `home`, on a file system that all machines share:
    lock.N        who keeps the server (pipeline/folder_lock.py)
    data-N/       its append-only files (pipeline/published_data.py)
    log           the server's own words
The address file lies wherever the settings say; the server's small files (socket, configuration) on its own machine.

One job after another may keep it, on whatever machine; a second one waits, and follows when the first one ends. A
server that died by itself is started again here, at a new address with the next epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline import address_file, published_data, server, server_files
from pipeline.address_file import Address
from pipeline.errors import RedisUnavailable
from pipeline.folder_lock import FolderLock, Holder
from pipeline.server import Server

log = logging.getLogger(__name__)

LOOK = 0.1
MOST_STARTS = 5
"""Starts of a server within WITHIN seconds; one more, and it is left to people."""
WITHIN = 600.0
AGAIN = 2.0
"""Seconds between two tries to start one."""
LOOK_AT_FILE = 2.0
"""Seconds between two looks at whether the address file still says what was published."""
SAY_AGAIN = 60.0
LARGEST_LOG = 1 << 20
"""Bytes; a longer log is begun anew."""
LAST_WORDS = 1.0
"""Seconds after a server's end within which the signal that ended it may reach this process too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`bind`: (address of this machine, port; 0 = a free one); `lease` of the lock in s; `job` of a scheduler or ""."""

    home: Path
    file: Path
    bind: tuple[str, int]
    lease: float
    fraction: float
    job: str


class Publisher:
    """`run` keeps the server until told to stop; `told` hears of each address that is published."""

    def __init__(self, plan: Plan, told: Callable[[Address], None] = lambda address: None) -> None:
        self._plan, self._told = plan, told
        self._stop = threading.Event()
        self._starts: deque[float] = deque()
        self._said = float("-inf")
        self._looked = float("-inf")
        self._server: Server | None = None
        self._has_data = False
        """Whether nobody else can write into the newest data folder; else we, or the next one, must copy it first."""

    def stop(self) -> None:
        """End the server in good order and return from `run`. For a signal's handler."""
        self._stop.set()

    def run(self) -> None:
        """Until told to stop. Raises ConfigError, RedisUnavailable (it does not stay up), OSError (the folder)."""
        home = server_files.private_folder(self._plan.home)
        about = {
            "job": self._plan.job, "started": time.time(), "host": socket.gethostname(), "pid": os.getpid(),
            "start_time": server_files.process_start(os.getpid()), "boot": server_files.boot_id(),
        }  # fmt: skip
        while not self._stop.is_set():
            lock = FolderLock(home / "lock", about, self._plan.lease, on_renewed=self._renewed)
            try:
                if not lock.take(stop=self._stop.is_set, told=self._waits):
                    return
            except OSError as error:
                self._say("the lock in %s can't be taken: %s; it is tried again", home, error)
                continue
            self._has_data = lock.before is None or lock.before.released
            try:
                self._keep(home, lock)
            finally:
                lock.release(in_order=self._has_data)
            if lock.why_lost and not self._stop.is_set():
                self._starts.clear()  # it did not end by itself
                log.error("the server is ended, since the lock was lost (%s); it is taken again", lock.why_lost)

    def _renewed(self, moment: float) -> None:
        running = self._server
        if running is not None:
            running.renewed(moment)

    def _waits(self, holder: Holder) -> None:
        self._say(
            "%s keeps the Redis in %s: this one waits, and follows when that one ends or is silent for %g s",
            holder, self._plan.home, self._plan.lease,
        )  # fmt: skip

    def _say(self, text: str, *about: object) -> None:
        """What may be said with every look, once a minute."""
        if time.monotonic() - self._said >= SAY_AGAIN:
            self._said = time.monotonic()
            log.warning(text, *about)

    def _keep(self, home: Path, lock: FolderLock) -> None:
        """Run one server after another, as long as the lock is held."""
        clean = self._has_data
        if not clean:
            log.warning("%s kept the Redis in %s and took no leave: its data are copied", lock.before, home)
        data: Path | None = None
        while not self._over(lock):
            self._count_start()
            try:
                data = data or published_data.prepared(
                    home, lock.number, clean=clean, given_up=lambda: self._over(lock)
                )
                self._has_data = True
                self._serve(home, lock, data)
            except (RedisUnavailable, OSError) as error:
                if not self._over(lock):
                    log.error("the server could not be started, and is tried again: %s", error)
                    self._stop.wait(AGAIN)

    def _over(self, lock: FolderLock) -> bool:
        return self._stop.is_set() or not lock.held

    def _count_start(self) -> None:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > WITHIN:
            self._starts.popleft()
        if len(self._starts) == MOST_STARTS:
            raise RedisUnavailable(
                f"the server did not stay up in {MOST_STARTS} tries within {now - self._starts[0]:.0f} s: "
                f"{self._plan.home / 'log'} says why"
            )
        self._starts.append(now)

    def _serve(self, home: Path, lock: FolderLock, data: Path) -> None:
        """One server's life. Its end is awaited, whatever it is: the lock may be released after it."""
        words = home / "log"
        with contextlib.suppress(FileNotFoundError):
            if words.stat().st_size > LARGEST_LOG:
                words.unlink()
        running = self._server = server.start_guarded(
            data, words, tcp=self._plan.bind, fraction=self._plan.fraction, limit=lock.lease / 2,
            given_up=lambda: self._over(lock),
        )  # fmt: skip
        try:
            address = self._address(running, lock)
            if self._publish(address, running, lock):
                log.warning("Redis is at %s, epoch %d", address.url, address.epoch)
                self._told(address)
            if lock.held:
                published_data.remove_older(home, lock.number, data)
            while running.alive() and not self._over(lock):
                if not self._stop.wait(LOOK):
                    self._published_still(address, running, lock)
            if self._stop.is_set() and lock.held:
                running.stop()
                self._withdraw(address, lock)
        finally:
            self._server = None
            running.kill()
        if not self._over(lock) and not self._stop.wait(LAST_WORDS):
            log.error("the server ended by itself (%s says why) and is started again", words)

    def _address(self, running: Server, lock: FolderLock) -> Address:
        """Of a server that nobody has been told of yet."""
        return Address(
            url=running.url,
            password=server_files.ensure_password(Path(running.password_file)),
            epoch=max(lock.number, address_file.last_epoch(self._plan.file) + 1),
            job=self._plan.job,
            started=time.time(),
        )

    def _publish(self, address: Address, running: Server, lock: FolderLock) -> bool:
        """Say where it is; again and again where the folder takes nothing. Nobody finds the server before."""
        while running.alive() and not self._over(lock):
            try:
                address_file.publish(self._plan.file, address)
            except OSError as error:
                log.error("the address can't be published in %s, and is tried again: %s", self._plan.file, error)
                self._stop.wait(1.0)
            else:
                self._looked = time.monotonic()
                return True
        return False

    def _published_still(self, address: Address, running: Server, lock: FolderLock) -> None:
        """Publish again where somebody has damaged the file: nobody else may write it as long as the lock is held."""
        if time.monotonic() - self._looked < LOOK_AT_FILE:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(RedisUnavailable):
            if address_file.read(self._plan.file) == address:
                return
        if lock.held:
            log.error("%s does not hold the address that was published: it is written again", self._plan.file)
            self._publish(address, running, lock)

    def _withdraw(self, address: Address, lock: FolderLock) -> None:
        """Leave no address behind at which nobody answers."""
        try:
            if lock.held and address_file.last_epoch(self._plan.file) <= address.epoch:
                address_file.withdraw(self._plan.file, address)
        except OSError as error:
            log.warning("the address in %s can't be withdrawn: %s; nobody answers there", self._plan.file, error)
