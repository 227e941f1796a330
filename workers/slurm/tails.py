"""The log files of the line's jobs: one a task, `NAME-JOB_TASK.out` in the line's folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from workers.slurm.rows import Row

END_BYTES = 65536
"""How much of a file's end is looked at for its last lines."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def path_of(row: Row, logs: Path) -> Path:
    """A task's log; a requeued one goes on in the same file."""
    return logs / f"{row.name}-{row.id}.out"


def tail(path: Path, lines: int) -> list[str]:
    """Its last lines, without terminal codes; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - END_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [_ESCAPES.sub("", line) for line in text.splitlines()][-lines:] if lines else []


def last_words(path: Path) -> str:
    """The last line that says something; empty where there is none."""
    return next((line.strip() for line in reversed(tail(path, 20)) if line.strip()), "")


def files(logs: Path, tag: str, kind: str = "", job: str = "") -> list[Path]:
    """The logs of a kind and of a job or task ("" for all), the oldest first."""
    name = re.compile(
        rf".+-({re.escape(kind) if kind else '[a-z]+'})-{tag}-({re.escape(job) if job else '[0-9]+'})(_\d+)?\.out"
    )
    found = [path for path in logs.glob("*.out") if name.fullmatch(path.name)] if logs.is_dir() else []
    return sorted(found, key=lambda path: path.stat().st_mtime)


def chosen(found: Sequence[Path], rows: Sequence[Row], logs: Path) -> list[Path]:
    """Of these files, those of tasks that Slurm knows; without one, the youngest."""
    known = {path_of(row, logs) for row in rows}
    return [path for path in found if path in known] or list(found[-1:])


def follow(look: Callable[[], Sequence[Path]], every: float = 0.5) -> Iterator[tuple[Path, str]]:
    """What is added to the files from now on, (file, text), for ever; new files of `look` from their beginning."""
    places = {path: path.stat().st_size for path in look()}
    while True:
        for path in look():
            with path.open("rb") as file:
                file.seek(places.get(path, 0))
                added = file.read(1 << 20)
            places[path] = places.get(path, 0) + len(added)
            if added:
                yield path, _ESCAPES.sub("", added.decode("utf-8", "replace"))
        time.sleep(every)
