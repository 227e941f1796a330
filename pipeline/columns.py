"""Values of dataset rows: made plain (what msgpack and JSON know), and found by a path such as `extra_info.index`."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import TaskError

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_INTEGERS = range(-(2**63), 2**64)
"""What msgpack can carry."""


def plain(value: Any, column: str) -> Any:
    """`value` as text, bytes, numbers, lists, maps or None; `column` names it in an error.

    Arrays become lists, times ISO text, durations seconds, decimals text. NaN and NaT mean that there is no value, so
    they become None, and a map's entry that is None is left out: a Parquet file can't tell the two apart. Raises
    TaskError for what no task can carry (infinity, a number of more than 64 bits, another object).
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)  # numpy's texts are texts, but no type that travels
    if isinstance(value, int):
        if value not in _INTEGERS:
            raise TaskError(f"column {column!r} is {value}: a whole number of more than 64 bits; make it text")
        return int(value)
    if isinstance(value, float):
        if math.isinf(value):
            raise TaskError(f"column {column!r} is {value}: a task can't carry it; make it text or a finite number")
        return None if math.isnan(value) else float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        above = f"{column}." if column else ""
        named = {_key(key, column): plain(item, f"{above}{key}") for key, item in value.items()}
        return {key: item for key, item in named.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item, f"{column}.{at}") for at, item in enumerate(value)]
    return _rarer(value, column)


def _rarer(value: Any, column: str) -> Any:
    if isinstance(value, np.datetime64 | np.timedelta64) and np.isnat(value):
        return None
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.timedelta64):
        return float(value / np.timedelta64(1, "s"))
    if isinstance(value, np.generic):
        return plain(value.item(), column)
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), column)
    if isinstance(value, datetime.date | datetime.time):
        return None if value != value else value.isoformat()  # NaT is the one that does not equal itself
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise TaskError(
        f"column {column!r} is a {type(value).__name__}: {str(value)[:80]!r}; a task can carry text, numbers, bytes, "
        "lists and maps"
    )


def _key(key: Any, column: str) -> str:
    if not isinstance(key, str | int):
        raise TaskError(f"column {column!r} is a map with the key {key!r:.80}: keys must be text")
    return str(key)


def at(row: Mapping[str, Any], path: str) -> Any:
    """The value at `path`: a column's name, or steps into it with dots between them.

    A step into a list is a number (-1 is the last), or a role where it is a list of messages: `prompt.user.content` is
    the text of the last one of the user. A text that holds a JSON map or list is stepped into as well. Raises TaskError
    where there is no such place.
    """
    if path in row:
        return row[path]
    first, *steps = path.split(".")
    if first not in row:
        raise TaskError(f"there is no column {first!r} (columns: {', '.join(map(str, row))})")
    value, come = row[first], first
    for step in steps:
        value = _step(value, step, come, path)
        come = f"{come}.{step}"
    return value


def _step(value: Any, step: str, come: str, path: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise TaskError(f"{path!r} steps into {come!r}, which is the text {value!r:.80}") from None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        if step not in value:
            raise TaskError(f"{path!r}: {come!r} has no {step!r} (it has: {', '.join(map(str, value)) or 'nothing'})")
        return value[step]
    if isinstance(value, list | tuple):
        if re.fullmatch(r"-?\d+", step):
            if not -len(value) <= int(step) < len(value):
                raise TaskError(f"{path!r}: {come!r} has {len(value)} entries, so there is no {step}")
            return value[int(step)]
        for item in reversed(value):
            if isinstance(item, Mapping) and item.get("role") == step:
                return item
        raise TaskError(f"{path!r}: no entry of the list {come!r} has the role {step!r}")
    raise TaskError(f"{path!r} steps into {come!r}, which is {value!r:.80}")


def filled(row: Mapping[str, Any], wanted: str) -> Any:
    """What `wanted` names: a path's value; or, where it has {paths} in braces, its text with their values put in.

    None where a value is None. Raises TaskError as `at` does.
    """
    if not _PLACEHOLDER.search(wanted):
        return plain(at(row, wanted), wanted)
    found = {path: plain(at(row, path), path) for path in _PLACEHOLDER.findall(wanted)}
    if any(value is None for value in found.values()):
        return None
    return _PLACEHOLDER.sub(lambda match: _text(found[match[1]], match[1]), wanted)


def _text(value: Any, path: str) -> str:
    if isinstance(value, bytes):
        raise TaskError(f"column {path!r} is {len(value)} bytes: they can't be part of a text")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
