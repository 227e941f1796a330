"""What an attempt rendered last, for servers that take messages: its messages, tools, and how many ids must stay."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple


class Said(NamedTuple):
    """The messages and tools behind a prompt, in OpenAI's form. `kept`: ids at its front that were there before."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    kept: int


class Spoken:
    """Remembers the newest rendering alone: a prompt is rendered right before it is sent."""

    def __init__(self) -> None:
        self._mark: tuple[int, int] | None = None
        self._said = Said([], [], 0)

    def note(
        self, ids: Sequence[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]], kept: int = 0
    ) -> None:
        """`ids` are what these messages were rendered to; the first `kept` of them were there before."""
        self._mark, self._said = _mark(ids), Said(messages, tools, kept)

    def of(self, ids: Sequence[int]) -> Said | None:
        """What `ids` were rendered from; None where they are not the newest rendering."""
        return self._said if self._mark is not None and self._mark == _mark(ids) else None


def _mark(ids: Sequence[int]) -> tuple[int, int]:
    return len(ids), zlib.crc32(array("I", ids).tobytes())
