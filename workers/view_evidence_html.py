"""A reward, its parts and its evidence as HTML, with the pictures that were kept. All text is escaped."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from workers.evidence import Item, arranged, scalar

PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
LARGEST_PICTURE = 1_000_000
"""Bytes of a picture that is put into the page; a larger one is a link alone."""

ALL_PICTURES = 20_000_000
"""Bytes of all pictures in one page."""


def reward(value: Any, parts: dict[str, Any], evidence: dict[str, Any], artifacts: list[Path]) -> str:
    """The section of a reward; "" where there is nothing to show. `artifacts`: files that become links and pictures."""
    links = {str(path): path for path in artifacts}
    items = arranged(evidence)
    facts = [[item.name, item.value] for item in items if item.kind == "fact"]
    shown = [_why(item) for item in items if item.kind == "why"]
    shown += [_parts(parts)] if parts else []
    before, after = (
        [_section(item, links) for item in items if (item.kind == "list") is early and item.kind not in ("why", "fact")]
        for early in (True, False)
    )
    shown += before
    shown += [_table([["", ""], *facts], links)] if facts else []
    shown += [*after, _files(artifacts)]
    head = f'<p class="reward">reward <b>{html.escape(scalar(value))}</b></p>' if value is not None else ""
    return head + "".join(shown)


def _why(item: Item) -> str:
    return f'<p class="why">{html.escape(item.value)}</p>'


def _parts(parts: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td class=number>{html.escape(scalar(value))}</td><td>{_bar(value)}</td></tr>"
        for name, value in parts.items()
    )
    return f"<table class=parts>{rows}</table>"


def _bar(value: Any) -> str:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        return ""
    return f'<span class="bar"><i style="width:{value * 100:.0f}%"></i></span>'


def _section(item: Item, links: dict[str, Path]) -> str:
    note = f' <span class="note">({html.escape(item.note)})</span>' if item.note else ""
    head = f"<h3>{html.escape(item.name)}{note}</h3>"
    if item.kind == "list":
        rows = "".join(f"<li>{_linked(row, links)}</li>" for row in item.value)
        return f"{head}<ul>{rows}</ul>"
    if item.kind == "table":
        return head + _table(item.value, links)
    return f'{head}<pre class="log">{html.escape(item.value)}</pre>'


def _table(rows: list[list[str]], links: dict[str, Path]) -> str:
    head, *body = rows
    made = f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>" if any(head) else ""
    for row in body:
        cells = [_linked(cell, links) for cell in row]
        first = f"<td>{cells[0]}</td>" if any(head) else f"<th>{cells[0]}</th>"
        made += f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells[1:])}</tr>"
    return f"<table>{made}</table>"


def _linked(text: str, links: dict[str, Path]) -> str:
    path = links.get(text)
    if path is None:
        return f'<span class="text">{html.escape(text)}</span>'
    return f'<a href="{html.escape(path.as_uri())}">{html.escape(path.name)}</a>'


def _files(artifacts: list[Path]) -> str:
    if not artifacts:
        return ""
    left = ALL_PICTURES
    files, pictures = "", ""
    for path in artifacts:
        uri, name = html.escape(path.as_uri()), html.escape(path.name)
        data = _picture(path, left)
        left -= len(data)
        if data:
            source = f"data:{PICTURES[path.suffix.lower()]};base64,{base64.b64encode(data).decode()}"
            pictures += (
                f'<figure><a href="{uri}"><img src="{source}" alt="{name}"></a><figcaption>{name}</figcaption></figure>'
            )
        else:
            files += f'<li><a href="{uri}">{name}</a></li>'
    return (
        "<h3>artifacts</h3>"
        + (f"<ul>{files}</ul>" if files else "")
        + (f'<div class="pictures">{pictures}</div>' if pictures else "")
    )


def _picture(path: Path, most: int) -> bytes:
    """The bytes of a picture that may stand in the page; none for anything else."""
    if path.suffix.lower() not in PICTURES:
        return b""
    try:
        if path.stat().st_size > min(LARGEST_PICTURE, most):
            return b""
        return path.read_bytes()
    except OSError:  # it was removed meanwhile: the link says where it was
        return b""
