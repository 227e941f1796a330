"""A lock in a folder that many machines share: one holder at a time, without flock, without a look at two clocks.

`NAME.N` are the lock's files, and the one with the highest N says who holds it. Who wants it creates `NAME.N+1`, which
a file system lets exactly one do (O_EXCL); the files are never renamed, so none can move a living one away. The highest
file stays when the lock is released, and says so. The number grows with each holder, so it orders them.

A holder writes a counter into its file every lease/5. Others may follow it only when they have WATCHED that file not
change for a whole lease by their own clock. The holder has lost the lock by its own clock after half a lease without a
renewal, be the folder away or the process frozen: the other half is for ending what the lock guards. A renewal is
written in place, so that a full file system does not hinder it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

_STATE = len('{"state": "')
"""Where in the file its changing part begins: the state, and the counter, both of a fixed width."""
_HELD, _RELEASED = "held    ", "released"


@dataclass(frozen=True, slots=True)
class Holder:
    """What one file of the lock says. `about` is empty where it can't be read (it was being written)."""

    number: int
    text: str
    released: bool
    about: Mapping[str, Any]

    def __str__(self) -> str:
        about = self.about
        job = f"job {about['job']} on " if about.get("job") else ""
        started = about.get("started")
        since = f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(started))}" if started else ""
        return f"{job}{about.get('host') or 'a machine that is not known'} (pid {about.get('pid', '?')}{since})"


def look(path: Path) -> Holder | None:
    """Who holds the lock, or held it last; None when nobody ever did. Raises OSError."""
    number = 0
    for _ in range(3):
        number = _highest(path)
        if number == 0:
            return None
        with contextlib.suppress(FileNotFoundError):  # its successor has removed it meanwhile
            return _holder(number, _file(path, number).read_text(encoding="utf-8", errors="replace"))
    return _holder(number, "")  # a list of names that is not fresh


class FolderLock:
    """One lock, held or not. `about` (JSON) goes into its file: job, host, pid, started; `lease` in seconds.

    on_renewed   called by the thread that renews, with the time (monotonic) from which a renewal counts
    Not for use by several threads, but for `held`.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], lease: float, *, on_renewed: Callable[[float], None] | None = None
    ) -> None:
        self._path, self._about, self.lease = path, dict(about), lease
        self.number = 0
        self.before: Holder | None = None
        """Who held it before; None when nobody ever did."""
        self.on_renewed = on_renewed
        self._handle: int | None = None
        self._beat = 0
        self._renewed = float("-inf")
        self._lost = ""
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Whether it is held for certain, now. Once false it stays so, until it is taken again."""
        if self._handle is None or self._lost:
            return False
        if time.monotonic() - self._renewed >= self.lease / 2:
            self._lose(f"it could not be renewed for {self.lease / 2:g} s")
        return not self._lost

    @property
    def why_lost(self) -> str:
        """Why it is not held any more; empty where it is."""
        return self._lost

    def take(
        self,
        *,
        wait: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        told: Callable[[Holder], None] = lambda holder: None,
    ) -> bool:
        """Take it, when nobody holds it or its holder is silent for a lease; whether it was taken.

        Gives up after `wait` seconds (None: never), or when `stop` says so. `told`: called with every look at another
        holder. Raises OSError where the folder can't be read or written for a lease, or for `wait` seconds if shorter.
        """
        began = time.monotonic()
        seen, since, trouble = None, began, None
        while True:
            now = time.monotonic()
            try:
                before = look(self._path)
                if seen is None or before is None or before.text != seen.text or before.number != seen.number:
                    seen, since = before, time.monotonic()
                if before is None or before.released or now - since >= self.lease:
                    if self._create((before.number if before else 0) + 1):
                        self.before = before
                        return True
                else:
                    told(before)
                trouble = None
            except OSError:
                trouble = trouble or time.monotonic()
                if time.monotonic() - trouble >= (self.lease if wait is None else min(wait, self.lease)):
                    raise
            if stop() or (wait is not None and time.monotonic() - began >= wait):
                return False
            time.sleep(min(0.25, self.lease / 10))

    def release(self, *, in_order: bool = True) -> None:
        """Give it back. What it guards must have ended, also where it was lost. Safe twice.

        `in_order` False: without a word, as if this process had died; the next one finds what it would find then.
        """
        if self._handle is None:
            return
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.lease)
        try:
            if in_order:
                self._write(_RELEASED)
        except OSError as error:
            log.warning("the lock %s can't be released (%s): the next one waits %g s", self._path, error, self.lease)
        with contextlib.suppress(OSError):
            os.close(self._handle)
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # -- the file ----------------------------------------------------------------------------------------------------

    def _create(self, number: int) -> bool:
        """Make file `number`; False where somebody else has made it, or a later one. Raises OSError."""
        file = _file(self._path, number)
        renewed = time.monotonic()
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        content = {"state": _HELD, "beat": _digits(0), "holder": secrets.token_hex(8), **self._about}
        try:
            os.write(handle, json.dumps(content).encode())
            os.fsync(handle)
            # Who slept since it looked may have made a number that others have used, and removed, meanwhile.
            late = _highest(self._path) != number
        except BaseException:
            os.close(handle)
            file.unlink(missing_ok=True)
            raise
        if late:
            os.close(handle)
            file.unlink(missing_ok=True)
            return False
        self.number, self._handle, self._beat, self._lost = number, handle, 0, ""
        self._renewed = renewed
        with contextlib.suppress(OSError):  # the next holder removes what is left
            for earlier in _numbers(self._path):
                if earlier < number:
                    _file(self._path, earlier).unlink(missing_ok=True)
        self._ending.clear()
        self._thread = threading.Thread(target=self._renew_on, name=f"lock-{self._path.name}", daemon=True)
        self._thread.start()
        return True

    def _renew_on(self) -> None:
        said = False
        while not self._ending.wait(self.lease / 5) and self.held:
            began = time.monotonic()
            try:
                self._beat += 1
                self._write(_HELD)
                last = _highest(self._path)
            except OSError as error:
                if not said:
                    log.warning("the lock %s can't be renewed (%s): it is tried again", self._path, error)
                said = True
                continue
            if last != self.number:
                self._lose(f"another one has it (number {last})" if last else "its file is gone")
            if self.held:  # not where it hung for half a lease: that is too late, even if nobody came
                self._renewed, said = began, False
                if self.on_renewed is not None:
                    self.on_renewed(began)

    def _write(self, state: str) -> None:
        assert self._handle is not None
        text = state + '", "beat": "' + _digits(self._beat)
        os.pwrite(self._handle, text.encode(), _STATE)
        os.fsync(self._handle)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            log.error("the lock %s is lost: %s", self._path, why)


def _digits(beat: int) -> str:
    return f"{beat:012d}"


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    return [int(match[1]) for name in os.listdir(path.parent) if (match := pattern.fullmatch(name))]


def _highest(path: Path) -> int:
    return max(_numbers(path), default=0)


def _holder(number: int, text: str) -> Holder:
    try:
        told = json.loads(text)
        return Holder(number, text, told.get("state") == _RELEASED, told)
    except (ValueError, AttributeError):
        return Holder(number, text, False, {})
