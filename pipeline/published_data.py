"""The append-only files of a Redis that moves: `data-N` folders on the shared file system, the highest N is in use.

N is the number of the lock (pipeline/folder_lock.py) under which a folder was made. Whoever follows a holder that took
its leave goes on with its folder. Whoever follows one that did not works on a copy: a server that hangs on some machine
has the old files open, and may write into them when it wakes; nobody reads those any more.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import RedisUnavailable
from pipeline.whole_file import flush_folder

_WHOLE = re.compile(r"data-(\d+)")
_ANY = re.compile(r"data-(\d+)(\.part)?")


def prepared(home: Path, number: int, *, clean: bool, given_up: Callable[[], bool]) -> Path:
    """The folder for the holder of lock `number`; `clean`: the one before took its leave.

    Raises RedisUnavailable: `given_up` said so while it was copied. OSError: no room, the folder is away.
    """
    newest = max(_numbers(home, _WHOLE), default=0)
    target = home / f"data-{number}"
    if newest and clean:
        return home / f"data-{newest}"
    if newest:
        draft = target.with_name(f"{target.name}.part")
        shutil.rmtree(draft, ignore_errors=True)
        _copy(home / f"data-{newest}", draft, given_up)
        draft.rename(target)
    else:
        target.mkdir(mode=0o700)
    flush_folder(home)
    return target


def remove_older(home: Path, number: int, used: Path) -> None:
    """What the holder of lock `number`, whose server answers on `used`, needs no more. Never what came after it."""
    for earlier in set(_numbers(home, _ANY)):
        for folder in (home / f"data-{earlier}", home / f"data-{earlier}.part"):
            if earlier <= number and folder != used:
                shutil.rmtree(folder, ignore_errors=True)


def _numbers(home: Path, pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for name in os.listdir(home) if (match := pattern.fullmatch(name))]


def _copy(source: Path, target: Path, given_up: Callable[[], bool]) -> None:
    """Copy, file by file, so that it lasts before the source is removed."""

    def copied(one: str, other: str) -> str:
        with open(one, "rb") as reader, open(other, "wb") as writer:
            while part := reader.read(1 << 24):
                if given_up():
                    raise RedisUnavailable(f"{source} is not copied any further: its server is not wanted any more")
                writer.write(part)
            writer.flush()
            os.fsync(writer.fileno())
        return other

    shutil.copytree(source, target, copy_function=copied)
    target.chmod(0o700)
    for folder, _, _ in os.walk(target):
        flush_folder(Path(folder))
