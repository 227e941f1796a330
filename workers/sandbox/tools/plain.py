"""Bytes of a terminal as text for a model: bounded in size, and without colours, titles and cursor movements."""

from __future__ import annotations

import re

HALF = 8_000
"""Bytes kept of the head and of the tail of an output, unless `sandbox.output_bytes` says otherwise."""

WIDTH = 2_000
"""Columns that a cursor movement can reach: an escape sequence must not make a gigabyte of spaces."""

_ALIGN = 400
"""Bytes of a cut tail in which its first whole line is looked for."""

_SEQUENCE = re.compile(
    "\x1b\\[([0-?]{0,64})[ -/]{0,8}([@-~])?"  # CSI: colours, cursor, erasing
    "|\x1b[\\]PX^_][^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\\\|\x9c)?"  # OSC and other strings: titles, links
    "|\x1b[ -/]{0,8}[0-~]?"  # two-byte sequences, character sets, and what was cut short
)
_CONTROL = dict.fromkeys([*range(0x08), *range(0x0B, 0x0D), *range(0x0E, 0x20), *range(0x7F, 0xA0)])
_MOVES = re.compile("\r|\x08|\x1b\\[([0-9]{0,4})([KCDGX])|[^\r\x08\x1b]+")


def plain(text: str) -> str:
    """`text` as a terminal without colours would show it, line by line. Takes linear time whatever the text is."""
    if "\x1b" in text:
        text = _SEQUENCE.sub(_only_moves, text)
    if "\r" in text or "\x08" in text or "\x1b" in text:
        text = "\n".join(_line(line) for line in text.split("\n"))
    return text.translate(_CONTROL)


def _only_moves(found: re.Match[str]) -> str:
    """Movements inside a line are kept for `_line`; all else is removed."""
    numbers, final = found[1], found[2]
    if final is not None and final in "KCDGX" and re.fullmatch("[0-9]{0,4}", numbers):
        return f"\x1b[{numbers}{final}"
    return ""


def _line(line: str) -> str:
    """One line with its carriage returns, backspaces and movements carried out."""
    line = line.removesuffix("\r")
    if "\r" not in line and "\x08" not in line and "\x1b" not in line:
        return line
    cells: list[str] = []
    column = 0
    for found in _MOVES.finditer(line):
        word = found[0]
        if word == "\r":
            column = 0
        elif word == "\x08":
            column = max(0, column - 1)
        elif found[2] is not None:
            column = _move(cells, column, found[1], found[2])
        else:
            if column > len(cells):
                cells.extend(" " * (column - len(cells)))
            cells[column : column + len(word)] = word
            column += len(word)
    return "".join(cells)


def _move(cells: list[str], column: int, number: str, final: str) -> int:
    """Carry out one movement or erasure; the new column."""
    count = int(number or 0)
    if final == "C":
        return max(column, min(column + max(1, count), WIDTH))
    if final == "D":
        return max(0, column - max(1, count))
    if final == "G":
        return min(max(1, count), WIDTH) - 1
    if final == "K":
        if count == 1:
            cells[: column + 1] = " " * min(column + 1, len(cells))
        else:
            del cells[0 if count == 2 else column :]
    return column


class Clip:
    """Keeps the head and the tail of bytes that come in, and counts what it left out between them."""

    def __init__(self, half: int = HALF) -> None:
        self._half = half
        self._head, self._tail = bytearray(), bytearray()
        self._cut = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        begin = max(room, len(data) - self._half)  # of much at once only the end can stay
        self._cut += begin - room
        if begin > room:
            self._cut += len(self._tail)
            self._tail.clear()
        self._tail += data[begin:]
        over = len(self._tail) - self._half
        if over > 0:
            self._cut += over
            del self._tail[:over]

    def take(self) -> str:
        """Plain text of what was kept, with one sentence where something was left out; begins anew."""
        if self._cut:
            skipped = self._align()
            head, tail = (plain(bytes(part).decode("utf-8", "replace")) for part in (self._head, self._tail))
            text = f"{head}\n[{self._cut + skipped} bytes left out]\n{tail}"
        else:
            text = plain(bytes(self._head + self._tail).decode("utf-8", "replace"))
        self._head.clear()
        self._tail.clear()
        self._cut = 0
        return text

    def _align(self) -> int:
        """Let the tail begin with a whole line, or at least with a whole character; the bytes that this cost."""
        skipped = self._tail.find(b"\n", 0, _ALIGN) + 1
        if not skipped:
            while skipped < min(3, len(self._tail)) and self._tail[skipped] & 0xC0 == 0x80:
                skipped += 1
        del self._tail[:skipped]
        return skipped


def with_notes(text: str, notes: list[str]) -> str:
    """`text`, and each note in brackets on a line of its own."""
    lines = [f"[{note}]" for note in notes]
    return "\n".join([text, *lines] if text else lines)
