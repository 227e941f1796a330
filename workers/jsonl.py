"""Task files: JSON lines, read whole and checked before anything is enqueued.

A line is a task, {"handler": "math", "data": {...}, "id": "..."}; or, where the handler is named for the whole file,
the bare data of one, {"question": ..., "expected_answer": ...}. In a bare line `id` becomes the task's id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import handlers
from pipeline.envelope import Task, from_map
from pipeline.errors import EnvelopeError, HandlerError, TaskError, UnknownHandler

FIELDS = tuple(item.name for item in fields(Task) if item.name != "extra")
LONGEST_ID = 200


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
    """All tasks of a file. Raises TaskError or UnknownHandler, which name the line and what is wrong with it."""
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            task = parse(text, handler)
            checker.check(task)
        except (TaskError, UnknownHandler) as error:
            raise type(error)(f"{name}, line {number}: {error}") from None
        if task.id is not None and seen.setdefault(task.id, number) != number:
            raise TaskError(
                f"{name}, line {number}: id {task.id!r} stands in line {seen[task.id]} too: ids name groups, "
                "give each task its own"
            )
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{name} holds no task: one JSON map a line is wanted")
    return tasks


def parse(text: str | bytes, handler: str | None) -> Task:
    """The task of one line. Raises TaskError."""
    value = _json(text)
    if not isinstance(value, dict):
        raise TaskError(f'a JSON {_kind(value)}, wanted a map such as {{"handler": "math", "data": {{...}}}}')
    if not (isinstance(value.get("data"), dict) and value.keys() <= set(FIELDS)):
        value = _bare(value, handler)
    value.setdefault("handler", handler)
    if isinstance(value.get("id"), int) and not isinstance(value["id"], bool):
        value["id"] = str(value["id"])
    if value["handler"] is None:
        raise TaskError('it names no handler: add "handler", or say --handler NAME for the whole file')
    try:
        task = from_map(Task, {**value, "schema": 1})
    except EnvelopeError as error:
        raise TaskError(str(error)) from None
    if task.id is not None and (not task.id or len(task.id) > LONGEST_ID or not task.id.isprintable()):
        raise TaskError(f"id {task.id!r:.80} can't name a group: 1 to {LONGEST_ID} printable characters")
    return task


def _bare(value: dict[str, Any], handler: str | None) -> dict[str, Any]:
    if handler is None:
        unknown = sorted(set(value) - set(FIELDS))
        if "handler" not in value:
            raise TaskError(
                'it names no handler: write {"handler": ..., "data": {...}}, or say --handler NAME for bare data'
            )
        if unknown:
            raise TaskError(
                f"field {unknown[0]!r} is unknown (known: {', '.join(FIELDS)}); "
                'the instance\'s own fields stand in "data"'
            )
        raise TaskError(
            "field 'data' is missing, or no map"
            if "data" not in value
            else f"field 'data' is a {_kind(value['data'])}, wanted a map"
        )
    data = dict(value)
    return {"handler": handler, "id": data.pop("id", None), "data": data}


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text.strip(), parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise TaskError(f"no valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"no UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except (RecursionError, ValueError) as error:
        raise TaskError(f"no valid JSON: {error}") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    names = {
        dict: "map",
        list: "list",
        str: "text",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
