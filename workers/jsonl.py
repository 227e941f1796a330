"""Task files as commands read them: JSON lines or Parquet, each task checked by its handler's own model.

A line is a task, {"handler": "math", "data": {...}, "id": "..."}; or, where the handler is named for the whole file,
the bare data of one, {"question": ..., "expected_answer": ...}. In a bare line `id` becomes the task's id.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import handlers
from pipeline.datasets import Chosen, Reader, read as read_file, read_lines
from pipeline.envelope import Task
from pipeline.errors import HandlerError, TaskError, UnknownHandler
from pipeline.parquet import MAGIC
from pipeline.task_lines import parse

__all__ = ["Checker", "parse", "read", "stream"]


class Checker:
    """Checks data by the handlers' own models, each loaded once. `skipped`: sentences about what went unchecked."""

    def __init__(self, path: str | None, *, check: bool = True) -> None:
        self._path = path
        self._check = check
        self._loaded: dict[str, Any] = {}
        self.skipped: list[str] = []

    def check(self, task: Task) -> None:
        """Raises UnknownHandler, TaskError."""
        if not self._check:
            return
        if task.handler not in self._loaded:
            self._loaded[task.handler] = self._load(task.handler)
        handler = self._loaded[task.handler]
        if handler is not None:
            handlers.check_task(handler, task.data)

    def _load(self, name: str) -> Any:
        try:
            return handlers.load(name, self._path)
        except UnknownHandler:
            raise
        except HandlerError as error:
            self.skipped.append(f"{error}; its tasks are enqueued unchecked")
            return None


def read(lines: Iterable[str | bytes], *, handler: str | None, checker: Checker, name: str = "the file") -> list[Task]:
    """All tasks of JSON lines. Raises TaskError or UnknownHandler, which name the line and what is wrong with it."""
    return list(read_lines(lines, Reader(handler=handler, check=checker.check), name=name))


def stream(file: str, reader: Reader, chosen: Chosen) -> Iterator[Task]:
    """The chosen tasks of a file, or of stdin (`-`: JSON lines), one by one. Raises as `read` does."""
    if file != "-":
        yield from read_file(Path(file), reader, chosen)
        return
    first = sys.stdin.buffer.readline()
    if first.startswith(MAGIC):
        raise TaskError("stdin is a Parquet file, which can't be read from a pipe: name the file")
    yield from read_lines(chain([first], sys.stdin.buffer), reader, chosen, "stdin")
