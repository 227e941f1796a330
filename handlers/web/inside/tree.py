"""A page's accessibility tree as text: one element a line, with numbers that calls can name.

Runs in the sandbox, by its Python alone. It reads what Playwright writes (`aria_snapshot(mode="ai")`, a list in YAML)
and leaves out what tells a reader nothing: wrappers without a name, labels that their field repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Number = Callable[["Node"], int]

FIELDS = frozenset(
    {"textbox", "searchbox", "combobox", "listbox", "checkbox", "radio", "switch", "slider", "spinbutton"}
)
ACTIVE = FIELDS | {
    "button", "link", "tab", "treeitem", "option", "menuitem", "menuitemcheckbox", "menuitemradio",
}  # fmt: skip
"""Roles that can be clicked or typed into."""

WRAPPERS = frozenset({"generic", "list", "rowgroup", "group", "none", "presentation"})
"""Without a name they say nothing; what is in them stands where they stood."""

TEXTS = {"text": "text", "paragraph": "text", "listitem": "item", "generic": "text"}
TOLD = ("checked", "selected", "disabled", "expanded", "pressed", "invalid")
FLOWING = frozenset({"paragraph", "listitem"})
"""Where links stand in the midst of a text, they are shown there."""

CELLS = frozenset({"cell", "gridcell", "columnheader", "rowheader"})

PART = 6000
"""Characters of a page that are shown at once."""

_ESCAPE = re.compile(r'\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[\\"/bfnrt])')
_PLAIN = {"\\": "\\", '"': '"', "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEAD = re.compile(r'(?P<role>/?[\w-]+)(?: (?P<name>"(?:[^"\\]|\\.)*"))?(?P<attributes>(?: \[[^\]]*\])*)')


@dataclass
class Node:
    """An element. `attributes`: what stood in brackets, name -> value ("" if none); `about`: `/url` and the like."""

    role: str
    name: str = ""
    text: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether it can be clicked or typed into."""
        if "ref" not in self.attributes:
            return False
        return self.role in ACTIVE or "cursor" in self.attributes or (self.role == "generic" and bool(self.name))


def parse(snapshot: str) -> Node:
    """The tree that Playwright wrote; its root has no role. A line that is none of its form is kept as text."""
    root = Node("")
    path: list[tuple[int, Node]] = [(-1, root)]
    for line in snapshot.splitlines():
        body = line.lstrip(" ")
        depth = len(line) - len(body)
        while path[-1][0] >= depth:
            path.pop()
        node = _node(body.removeprefix("- "))
        if node.role.startswith("/"):
            path[-1][1].about[node.role[1:]] = node.text
        else:
            path[-1][1].children.append(node)
            path.append((depth, node))
    return root


def _node(body: str) -> Node:
    if body.startswith("'"):  # a whole key in YAML's single quotes
        key, _, rest = body[1:].replace("''", "\0").partition("'")
        head, value = key.replace("\0", "'"), rest.replace("\0", "''")
        found = _HEAD.fullmatch(head)
    else:
        found = _HEAD.match(body)
        value = body[found.end() :] if found else ""
    if found is None or not (value in ("", ":") or value.startswith(": ")):
        return Node("text", text=body)
    attributes = dict(_attribute(item) for item in re.findall(r"\[([^\]]*)\]", found["attributes"]))
    return Node(found["role"], _unquoted(found["name"] or ""), _unquoted(value[2:]), attributes)


def _attribute(item: str) -> tuple[str, str]:
    name, _, value = item.partition("=")
    return name, value


def _unquoted(text: str) -> str:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    return _ESCAPE.sub(lambda m: _PLAIN[m[1]] if m[1] in _PLAIN else chr(int(m[1][1:], 16)), text[1:-1])


def render(root: Node, number: Number) -> list[str]:
    """The tree's lines; `number` gives an active element its number, in the order of the page."""
    return list(_lines(root, number, ""))


def _lines(node: Node, number: Number, indent: str) -> Iterator[str]:
    children = node.children
    for at, child in enumerate(children):
        beside = {sibling.name for sibling in children[max(0, at - 1) : at + 2] if sibling.role in FIELDS}
        if child.role in TEXTS and not child.children and not child.active and child.text in beside:
            continue
        yield from _element(child, number, indent)


def _element(node: Node, number: Number, indent: str) -> Iterator[str]:
    if node.role in WRAPPERS and not node.name and not node.active:
        if node.text:
            yield f"{indent}text: {_one_line(node.text)}"
        yield from _lines(node, number, indent)
    elif node.role == "row" and all(child.role in CELLS for child in node.children):
        yield from _row(node, number, indent)
    elif node.role in FLOWING and not node.active and node.children and all(map(_is_inline, node.children)):
        words = " ".join(
            child.text if child.role == "text" else _line(child, number, brief=True) for child in node.children
        )
        yield f"{indent}{TEXTS[node.role]}: {_one_line(words)}"
    else:
        yield f"{indent}{_line(node, number)}"
        if node.role != "combobox" or any(child.role != "option" for child in node.children):
            yield from _lines(node, number, indent + "  ")


def _is_inline(node: Node) -> bool:
    return node.role == "text" or (node.active and bool(node.name) and not node.children)


def _row(node: Node, number: Number, indent: str) -> Iterator[str]:
    """A row of a table in one line, where each of its cells takes one."""
    cells = [
        [cell.text or cell.name] if not cell.children else list(_lines(cell, number, "")) for cell in node.children
    ]
    mark = f"[{number(node)}] " if node.active else ""
    if all(len(cell) <= 1 for cell in cells):
        told = [_one_line(cell[0].removeprefix("text: ")) if cell else "" for cell in cells]
        yield f"{indent}{mark}row: {' | '.join(told)}"
        return
    yield f"{indent}{mark}row"
    for cell in cells:
        yield from (f"{indent}  {line}" for line in ("cell", *(f"  {line}" for line in cell)))


def _line(node: Node, number: Number, *, brief: bool = False) -> str:
    """One element; `brief` leaves out where a link leads."""
    if node.role in TEXTS and not node.name and not node.active:
        return f"{TEXTS[node.role]}: {_one_line(node.text)}" if node.text else TEXTS[node.role]
    said = "clickable" if node.role == "generic" else node.role
    words = [f"[{number(node)}] {said}" if node.active else said]
    if "level" in node.attributes:
        words.append(node.attributes["level"])
    name, text = node.name, node.text
    if not name and text and node.role not in FIELDS:
        name, text = text, ""
    elif node.role not in FIELDS:
        text = ""  # of what has a name: a part of it
    if name:
        words.append('"' + _one_line(name) + '"')
    told = [
        item if value in ("", "true") else f"{item} {value}" for item, value in node.attributes.items() if item in TOLD
    ]
    options = [child for child in node.children if child.role == "option"] if node.role == "combobox" else []
    chosen = [child.name or child.text for child in options if "selected" in child.attributes]
    if told:
        words.append(f"({', '.join(told)})")
    line = " ".join(words)
    if node.about.get("url") and not brief:
        line += f" -> {_one_line(node.about['url'])}"
    if chosen or text:
        line += f": {_one_line(text or ', '.join(chosen))}"
    if options:
        line += f" (one of: {' | '.join(_one_line(child.name or child.text) for child in options)})"
    return line


def _one_line(text: str) -> str:
    return " ".join(text.split())


def parts(lines: list[str], size: int) -> list[str]:
    """The lines in parts of about `size` characters each, at least one; a line that is longer is cut in pieces."""
    found: list[str] = []
    part: list[str] = []
    room = size
    for line in lines:
        for begin in range(0, max(1, len(line)), size):
            piece = line[begin : begin + size]
            if part and len(piece) >= room:
                found.append("\n".join(part))
                part, room = [], size
            part.append(piece)
            room -= len(piece) + 1
    return [*found, "\n".join(part)]
