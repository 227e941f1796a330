"""Datasets as tasks: rows of a JSON lines or Parquet file, one after the other, never the whole file in memory.

    from pipeline.datasets import read_tasks
    await client.enqueue(read_tasks("train.parquet", limit=1000), samples=8)

A row is a whole task, a task's bare data, or a row of columns that a mapping turns into one: a section of `datasets`
in the configuration, or what is recognised by the columns (pipeline/known_columns.py).
"""

from __future__ import annotations

import random
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import task_lines
from pipeline.columns import filled, plain
from pipeline.config import Config, DatasetConfig, load
from pipeline.envelope import SCHEMA, Task, check_task, decode, encode
from pipeline.errors import ConfigError, TaskError, UnknownHandler
from pipeline.known_columns import recognised, unknown
from pipeline.parquet import is_parquet, rows_of

Check = Callable[[Task], None]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which rows of a file: those from `start` to before `stop` (None: to the end), at most `limit` of them.

    `shuffle`: a seed; the rows from `start` to `stop` come in the order that it draws, and `limit` takes the first.
    """

    start: int = 0
    stop: int | None = None
    limit: int | None = None
    shuffle: int | None = None


class Place(NamedTuple):
    """A row and where it stands: `name` is "line 3" or "row 2"; `number` counts all rows of the file, from 0.

    `json`: it was read from JSON, so what is null in it was meant to be.
    """

    name: str
    number: int
    row: dict[str, Any]
    json: bool = False


@dataclass(frozen=True)
class Reader:
    """Turns rows into tasks. `mapping`: the dataset's, None to go by the columns. `handler`: wins over any other.

    `check`: raises TaskError for a task whose data its handler does not take. `once`: of rows with the same id the
    first one counts; otherwise they are an error.
    """

    mapping: DatasetConfig | None = None
    handler: str | None = None
    check: Check | None = None
    once: bool = False
    _seen: dict[str, str] = field(default_factory=dict)

    def tasks(self, places: Iterable[Place], file: str) -> Iterator[Task]:
        """Each row's task. Raises TaskError and UnknownHandler, which name the file, the row, and what is wrong."""
        for place in places:
            try:
                task = self._task(place)
                if self._is_first(task, place):
                    yield task
            except (TaskError, UnknownHandler) as error:
                raise type(error)(f"{file}, {place.name}: {error}") from None
            except RecursionError:
                raise TaskError(f"{file}, {place.name}: it holds itself, or too many lists in one another") from None

    def _task(self, place: Place) -> Task:
        mapping, row = self.mapping, place.row
        whole = mapping is None and task_lines.is_whole(row)
        if mapping is None and not whole:
            mapping = recognised(row, place.number, self.handler)
        if mapping is not None:
            task = mapped(row, mapping, self.handler)
        elif self.handler is None and "handler" not in row:
            raise unknown(row)
        else:
            value = row if place.json else plain(row, "")
            task = task_lines.whole(value, self.handler) if whole else task_lines.bare(value, self.handler)
        try:
            check_task(task)
            if self.check is not None:
                self.check(task)
        except TaskError as error:
            raise TaskError(f"{error}{_sources(str(error), mapping)}") from None
        return task

    def _is_first(self, task: Task, place: Place) -> bool:
        first = self._seen.setdefault(task.id, place.name) if task.id is not None else place.name
        if first != place.name and not self.once:
            raise TaskError(
                f"id {task.id!r} stands in {first} too: ids name groups, give each task its own (or take only the "
                "first of each: --once)"
            )
        return first == place.name


def mapped(row: Mapping[str, Any], mapping: DatasetConfig, handler: str | None = None) -> Task:
    """The task of one row. Raises TaskError, which names the column and its value."""
    named = handler or mapping.handler
    if not named:
        raise TaskError("its mapping names no handler: add `handler`, or say --handler NAME")
    data: dict[str, Any] = {}
    if mapping.keep or not mapping.fields:
        data |= {str(name): plain(value, str(name)) for name, value in row.items()}
    data |= {name: filled(row, wanted) for name, wanted in mapping.fields.items()}
    data |= mapping.constants
    id = filled(row, mapping.id) if mapping.id else None
    if mapping.id and (id is None or isinstance(id, bool | list | dict | bytes)):
        raise TaskError(f"its id, column {mapping.id!r}, is {id!r:.80}: wanted text or a number")
    return task_lines.whole(
        {
            "handler": named,
            "id": None if id is None else str(id),
            "data": {name: value for name, value in data.items() if value is not None},
            "sampling": dict(mapping.sampling),
            "limits": dict(mapping.limits),
        },
        named,
    )


def _sources(sentence: str, mapping: DatasetConfig | None) -> str:
    """Which columns the fields of a complaint came from."""
    fields = mapping.fields.items() if mapping is not None else ()
    named = [f"{name!r} comes from column {wanted!r}" for name, wanted in fields if f"field {name!r}" in sentence]
    return f" ({', '.join(named)})" if named else ""


def mapping_of(config: Config, name: str) -> DatasetConfig:
    """The section of `datasets` called `name`. Raises ConfigError, which lists those that there are."""
    if name not in config.datasets:
        there = ", ".join(config.datasets) or "none"
        raise ConfigError(f"there is no dataset {name!r} in section `datasets` (there: {there})")
    return config.datasets[name]


def read_tasks(
    file: str | Path,
    *,
    dataset: str | DatasetConfig | None = None,
    handler: str | None = None,
    rows: tuple[int, int | None] = (0, None),
    limit: int | None = None,
    shuffle: int | None = None,
    once: bool = False,
    config: Config | None = None,
    check: Check | None = None,
) -> Iterator[Task]:
    """The tasks of a JSON lines or Parquet file, one by one.

    `dataset`: a section of `datasets` by name, or a mapping; None goes by the columns. `handler`: wins over the
    mapping's, and takes rows that are a task's bare data. `rows`: from, to before, counted from 0; `limit`: at most so
    many of them; `shuffle`: a seed for their order. `once`: of rows with the same id only the first one. `config`: the
    settings, else the usual ones are read.

    Raises TaskError with file, row, column and value, when it comes to such a row; ConfigError.
    """
    mapping = mapping_of(config or load(), dataset) if isinstance(dataset, str) else dataset
    chosen = Chosen(start=rows[0], stop=rows[1], limit=limit, shuffle=shuffle)
    return read(Path(file), Reader(mapping, handler, check, once), chosen)


def tasks_of_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    dataset: DatasetConfig | None = None,
    handler: str | None = None,
    check: Check | None = None,
    name: str = "the rows",
) -> Iterator[Task]:
    """The same for rows that the caller has: maps of column to value, numpy's and pandas' values included."""
    places = (Place(f"row {number}", number, dict(row)) for number, row in enumerate(rows))
    return Reader(dataset, handler, check).tasks(places, name)


def read(file: Path, reader: Reader, chosen: Chosen | None = None) -> Iterator[Task]:
    """The chosen tasks of a file. Raises TaskError."""
    chosen = chosen or Chosen()
    try:
        if is_parquet(file):
            found = (Place(f"row {number}", number, row) for number, row in rows_of(file, chosen.start, chosen.stop))
            yield from ordered(_some(reader.tasks(found, str(file)), str(file)), chosen)
            return
        with file.open("rb") as lines:
            yield from read_lines(lines, reader, chosen, str(file))
    except OSError as error:
        raise TaskError(f"{file} can't be read: {error.strerror or error}") from None


def read_lines(
    lines: Iterable[str | bytes], reader: Reader, chosen: Chosen | None = None, name: str = "the lines"
) -> Iterator[Task]:
    """The chosen tasks of JSON lines; empty lines are passed over. Raises TaskError."""
    chosen = chosen or Chosen()
    places = islice(_places(lines, name), chosen.start, chosen.stop)
    return ordered(_some(reader.tasks(places, name), name), chosen)


def _places(lines: Iterable[str | bytes], name: str) -> Iterator[Place]:
    count = 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = task_lines.row_of(text)
        except TaskError as error:
            raise TaskError(f"{name}, line {number}: {error}") from None
        yield Place(f"line {number}", count, row, json=True)
        count += 1


def _some(tasks: Iterator[Task], name: str) -> Iterator[Task]:
    """Raises TaskError where there is no task at all."""
    empty = True
    for task in tasks:
        empty = False
        yield task
    if empty:
        raise TaskError(f"{name} holds no task: one JSON map a line, or one row of Parquet, is wanted")


def ordered(tasks: Iterator[Task], chosen: Chosen) -> Iterator[Task]:
    """At most `limit` of the tasks, in their own order or in that of the seed."""
    if chosen.shuffle is None:
        yield from islice(tasks, chosen.limit)
        return
    with Spool() as spool:
        for task in tasks:
            spool.add(task)
        order = list(range(len(spool)))
        random.Random(chosen.shuffle).shuffle(order)
        yield from spool.tasks(order[: chosen.limit])


class Spool:
    """Tasks on disk (a temporary file), so that they can be gone through twice and in any order. A context manager."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rollout-tasks-")  # noqa: SIM115 - `__exit__` closes it
        self._ends = array("Q", [0])

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, task: Task) -> None:
        """Raises TaskError where the disk is full."""
        try:
            self._file.seek(self._ends[-1])
            self._ends.append(self._ends[-1] + self._file.write(encode(task, SCHEMA)))
        except OSError as error:
            raise TaskError(f"the tasks can't be put aside in {tempfile.gettempdir()}: {error.strerror}") from None

    def tasks(self, order: Iterable[int] | None = None) -> Iterator[Task]:
        """The tasks by number, all of them in the order in which they came by default."""
        for number in range(len(self)) if order is None else order:
            self._file.seek(self._ends[number])
            yield decode(Task, self._file.read(self._ends[number + 1] - self._ends[number]))
