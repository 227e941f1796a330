"""The program in an answer: its last fenced block in the right language."""

from __future__ import annotations

import re

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*")


def last_block(answer: str, *languages: str) -> str | None:
    """Text of the last closed block that is marked with one of `languages`, else of the last without a mark.

    None when there is neither; a block that is never closed (an answer that was cut off) is none.
    """
    found: dict[bool, str] = {}
    fence, mark, lines = "", "", [""]
    for line in answer.splitlines():
        edge = FENCE.fullmatch(line)
        if not fence:
            if edge:
                fence, mark, lines = edge[1], edge[2].lower(), []
        elif edge and not edge[2] and edge[1].startswith(fence):
            if mark in languages or not mark:
                found[bool(mark)] = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return found.get(True, found.get(False))
