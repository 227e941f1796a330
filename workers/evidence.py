"""A reward's evidence put in order for a person: why first, then names of what failed, facts, tables, and logs last.

Families agree on `why`, `failing`, `commands` and `log`; anything else is shown by its shape. What is long is cut, and
how much there was is said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What steers a terminal or turns the direction of text, and halves of characters, which no output takes."""

Kind = Literal["why", "fact", "list", "table", "block", "json"]

ORDER: tuple[Kind, ...] = ("why", "list", "fact", "table", "json", "block")

FIRST = ("failing", "not_run", "commands")
"""Lists, in the order in which they are looked for."""

LAST = ("stdout", "stderr", "log")

SHORT = 160
"""Characters of a text in a line; a longer one, or one of several lines, is a block."""

ENTRIES = 50
BLOCK = 6000
JSON = 3000
CELL = 200
COLUMNS = 6


@dataclass(frozen=True)
class Item:
    """One part of the evidence. `value`: text (why, fact, block, json), texts (list), or rows with a head (table).

    `note`: how much of it is not shown; empty for none.
    """

    name: str
    kind: Kind
    value: Any
    note: str = ""


def arranged(evidence: dict[str, Any]) -> list[Item]:
    """Everything in the evidence, in the order in which it is read."""
    items = [_item(name, value, evidence) for name, value in evidence.items() if not _is_count(name, evidence)]
    return sorted(items, key=lambda item: (ORDER.index(item.kind), _rank(item.name)))


def _is_count(name: str, evidence: dict[str, Any]) -> bool:
    """Whether it only says how long a list beside it is."""
    return name.endswith("_count") and isinstance(evidence.get(name.removesuffix("_count")), list)


def _rank(name: str) -> int:
    if name in FIRST:
        return FIRST.index(name) - len(FIRST)
    return LAST.index(name) + 1 if name in LAST else 0


def _item(name: str, value: Any, evidence: dict[str, Any]) -> Item:
    if name == "why" and isinstance(value, str):
        return Item(name, "why", clean(value))
    if isinstance(value, str):
        value = clean(value)
        if name not in LAST and len(value) <= SHORT and "\n" not in value:
            return Item(name, "fact", value)
        return _block(name, value)
    if value is None or isinstance(value, bool | int | float | bytes):
        return Item(name, "fact", scalar(value))
    if isinstance(value, list | tuple):
        rows = list(value)
        if not rows:
            return Item(name, "fact", "none")
        if all(_is_scalar(item) for item in rows):
            return _list(name, rows, evidence.get(f"{name}_count"))
        head = _head(rows)
        if head:
            shown = [[cut(scalar(row.get(column)), CELL) for column in head] for row in rows[:ENTRIES]]
            return Item(name, "table", [head, *shown], _more(len(rows)))
    if isinstance(value, dict) and value and all(_is_scalar(item) for item in value.values()):
        return Item(name, "table", [["", ""], *([str(key), cut(scalar(item), 1000)] for key, item in value.items())])
    try:
        text = clean(json.dumps(value, ensure_ascii=False, indent=2, default=scalar))
    except (RecursionError, ValueError, TypeError) as error:  # a handler may put in anything
        return Item(name, "fact", f"{type(value).__name__} that can't be shown: {error}")
    return Item(name, "json", text[:JSON], f"{len(text)} characters, the first {JSON} are shown" * (len(text) > JSON))


def _list(name: str, rows: list[Any], counted: Any) -> Item:
    """`counted`: how many there were, where the evidence holds but some."""
    count = counted if isinstance(counted, int) and counted > len(rows) else len(rows)
    shown = [cut(scalar(row), 2000) for row in rows[:ENTRIES]]
    return Item(name, "list", shown, f"{count}, {len(shown)} are shown" if count > len(shown) else "")


def _block(name: str, text: str) -> Item:
    if len(text) <= BLOCK:
        return Item(name, "block", text)
    if name in LAST:  # a log's end says most
        return Item(name, "block", text[-BLOCK:], f"{len(text)} characters, the last {BLOCK} are shown")
    return Item(name, "block", text[:BLOCK], f"{len(text)} characters, the first {BLOCK} are shown")


def _head(rows: list[Any]) -> list[str]:
    """The columns of a list of small maps; none where it is something else."""
    names: dict[str, None] = {}
    for row in rows:
        if not isinstance(row, dict) or not all(_is_scalar(item) for item in row.values()):
            return []
        names |= dict.fromkeys(map(str, row))
    return list(names) if 0 < len(names) <= COLUMNS else []


def _more(count: int) -> str:
    return f"{count}, {ENTRIES} are shown" if count > ENTRIES else ""


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float | bytes)


def scalar(value: Any) -> str:
    """One value as text."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def clean(text: str) -> str:
    """Without colours, and with a mark for all else that steers a terminal: a policy may have written it."""
    plain = _COLOURS.sub("", text).replace("\r\n", "\n").expandtabs(4)
    return _CONTROLS.sub("\ufffd", plain)


def cut(text: str, most: int) -> str:
    """The beginning of a text, with its length where it is longer."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"
