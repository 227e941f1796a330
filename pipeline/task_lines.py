"""One line of a task file: JSON, strictly, and what a whole task in it looks like."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from pipeline.envelope import SCHEMA, Task, from_map
from pipeline.errors import EnvelopeError, TaskError

FIELDS = tuple(item.name for item in fields(Task) if item.name != "extra")
LONGEST_ID = 200


def parse(text: str | bytes, handler: str | None) -> Task:
    """The task of one line: a whole one, or bare data for `handler`. Raises TaskError."""
    value = row_of(text)
    return whole(value, handler) if is_whole(value) else bare(value, handler)


def row_of(text: str | bytes) -> dict[str, Any]:
    """The map in one line. Raises TaskError."""
    value = _json(text)
    if not isinstance(value, dict):
        raise TaskError(f'a JSON {_kind(value)}, wanted a map such as {{"handler": "math", "data": {{...}}}}')
    return value


def is_whole(value: dict[str, Any]) -> bool:
    """Whether it is a whole task; else it is the bare data of one, or a dataset's row."""
    return isinstance(value.get("data"), dict) and value.keys() <= set(FIELDS)


def whole(value: dict[str, Any], handler: str | None) -> Task:
    """The task of a map with a task's fields; `handler` where it names none. Raises TaskError."""
    value = {"handler": handler, **value}
    if isinstance(value.get("id"), int) and not isinstance(value["id"], bool):
        value["id"] = str(value["id"])
    if value["handler"] is None:
        raise TaskError('it names no handler: add "handler", or say --handler NAME for the whole file')
    try:
        task = from_map(Task, {**value, "schema": SCHEMA})
    except EnvelopeError as error:
        raise TaskError(str(error)) from None
    if task.id is not None and (not task.id or len(task.id) > LONGEST_ID or not task.id.isprintable()):
        raise TaskError(f"id {task.id!r:.80} can't name a group: 1 to {LONGEST_ID} printable characters")
    return task


def bare(value: dict[str, Any], handler: str | None) -> Task:
    """The task whose data this map is; its `id` becomes the task's. Raises TaskError where nobody names a handler."""
    if handler is None:
        raise TaskError(_unnamed(value))
    data = dict(value)
    return whole({"handler": handler, "id": data.pop("id", None), "data": data}, handler)


def line_of(task: Task) -> str:
    """A task as one line that `parse` reads. Raises TaskError for data that is no JSON (bytes)."""
    named = {name: getattr(task, name) for name in FIELDS}
    told = {name: value for name, value in named.items() if value not in (None, {}) and (name, value) != _USUAL_POLICY}
    try:
        return json.dumps({**told, "handler": task.handler, "data": task.data}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {task.id or task.handler} can't be written as a line of JSON: {error}") from None


_USUAL_POLICY = ("policy", Task(handler="").policy)


def _unnamed(value: dict[str, Any]) -> str:
    unknown = sorted(set(value) - set(FIELDS))
    if "handler" not in value:
        return 'it names no handler: write {"handler": ..., "data": {...}}, or say --handler NAME for bare data'
    if unknown:
        return (
            f'field {unknown[0]!r} is unknown (known: {", ".join(FIELDS)}); the instance\'s own fields stand in "data"'
        )
    if "data" not in value:
        return "field 'data' is missing, or no map"
    return f"field 'data' is a {_kind(value['data'])}, wanted a map"


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text.strip(), parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise TaskError(f"no valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"no UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except (RecursionError, ValueError) as error:
        raise TaskError(f"no valid JSON: {error}") from None


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits:.40} is beyond every float")
    return value


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
