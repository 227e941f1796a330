"""A reward with its parts and its evidence as text: in `rollout try` and `rollout show`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.text import Text

from workers.evidence import Item, arranged, cut, scalar

FIELD = 300
"""Characters of one field of a task."""


def text(parts: dict[str, Any], evidence: dict[str, Any]) -> Text:
    """Parts as a small table, then the evidence; empty where there is neither."""
    lines: list[tuple[str, str]] = []
    items = arranged(evidence)
    for item in items:
        if item.kind == "why":
            lines += _said("why", item.value)
    lines += _parts(parts)
    for item in items:
        if item.kind != "why":
            lines += _lines(item)
    made = Text()
    for line, style in lines:
        made.append(f"{line}\n", style=style)
    made.rstrip()
    return made


def _said(name: str, value: str) -> list[tuple[str, str]]:
    first, *rest = value.splitlines() or [""]
    return [(f"  {name:10} {first}", "bold"), *((f"  {'':10} {line}", "") for line in rest)]


def _parts(parts: dict[str, Any]) -> list[tuple[str, str]]:
    width = max(map(len, parts), default=0)
    return [
        (f"  {'parts' if at == 0 else '':10} {name:{width}}  {scalar(value):>6}", "")
        for at, (name, value) in enumerate(parts.items())
    ]


def _lines(item: Item) -> Iterable[tuple[str, str]]:
    head = f"  {item.name}{f' ({item.note})' if item.note else ''}"
    if item.kind == "fact":
        yield f"  {item.name:10} {item.value}", ""
        return
    yield head, "bold"
    if item.kind == "table":
        for row in _aligned(item.value):
            yield f"    {row}", ""
        return
    rows = item.value if item.kind == "list" else item.value.rstrip("\n").split("\n")
    mark = "" if item.kind == "list" else "| "
    for row in rows:
        for line in str(row).split("\n"):
            yield f"    {mark}{line.rstrip()}", "" if item.kind != "block" else "dim"


def _aligned(rows: list[list[str]]) -> Iterable[str]:
    head, *body = [[" ".join(cell.split()) for cell in row] for row in rows]
    shown = [head, *body] if any(head) else body
    widths = [max(len(row[at]) for row in shown) for at in range(len(head))]
    for row in shown:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def task_fields(data: dict[str, Any]) -> list[tuple[str, str]]:
    """A task's fields, each in a line and cut."""
    return [(str(name), cut(" ".join(_flat(value).split()), FIELD)) for name, value in data.items()]


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=scalar) if isinstance(value, dict | list) else scalar(value)
