"""Git diffs as bytes: their parts by file, the paths they touch, and a diff without some of its files.

Pure functions. A diff is never decoded: paths are, with what is no UTF-8 kept as surrogates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

HEAD = b"diff --git "

_PATH_LINES = (b"--- ", b"+++ ", b"rename from ", b"rename to ", b"copy from ", b"copy to ")
_HEADER = (
    b"index ", b"old mode ", b"new mode ", b"new file mode ", b"deleted file mode ", b"similarity index ",
    b"dissimilarity index ", *_PATH_LINES,
)  # fmt: skip
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_BINARY = re.compile(rb"(literal|delta) \d+|[A-Za-z][^ \r]+")
_ESCAPE = re.compile(rb'\\([0-7]{3}|["\\abfnrtv])')
_ESCAPED = dict(zip(b'"\\abfnrtv', b'"\\\a\b\f\n\r\t\v', strict=True))


class Part(NamedTuple):
    """What a diff does to one file. `paths`: its name after the change first, then the one before where it differs."""

    paths: tuple[str, ...]
    data: bytes
    deleted: bool = False
    new: bool = False

    @property
    def path(self) -> str:
        return self.paths[0]


def split(diff: bytes) -> list[Part]:
    """The diff's parts in order; joined they are the diff again, from its first `diff --git` on.

    Raises ValueError where there is something but no git diff, or a part that names no file.
    """
    starts = [match.start() for match in re.finditer(rb"^diff --git ", diff, re.MULTILINE)]
    if not starts:
        if not diff.strip():
            return []
        raise ValueError(f"this is no git diff, it has no line that begins with `diff --git`: {diff[:80]!r}")
    return [_part(diff[start:end]) for start, end in zip(starts, [*starts[1:], len(diff)], strict=True)]


def without(diff: bytes, unwanted: Iterable[str] | Callable[[str], bool]) -> tuple[bytes, list[str]]:
    """The diff without the parts that touch an unwanted path, and the paths that were left out, sorted."""
    names = None if callable(unwanted) else set(unwanted)
    judge = unwanted if callable(unwanted) else (lambda path: path in (names or ()))
    kept: list[bytes] = []
    left_out: set[str] = set()
    for part in split(diff):
        if any(judge(path) for path in part.paths):
            left_out.update(part.paths)
        else:
            kept.append(part.data)
    return b"".join(kept), sorted(left_out)


def check(diff: bytes) -> None:
    """Raises ValueError where a part holds more than the change of its one file.

    Git also applies a plain diff that stands behind another's last line; `split` doesn't see such a file.
    """
    for part in split(diff):
        lines = iter(part.data.split(b"\n")[1:])
        seen: set[bytes] = set()
        for line in lines:
            known = next((word for word in _HEADER if line.startswith(word)), b"")
            if line.startswith(b"@@ -"):
                _pass_hunk(line, lines, part.path)
            elif line == b"GIT binary patch":
                seen.add(b"binary")
            elif known and known not in seen and not seen & {b"hunk", b"binary"}:
                seen.add(known)
                continue
            elif not (line == b"" or line.startswith(b"\\") or (b"binary" in seen and _BINARY.fullmatch(line))):
                raise ValueError(f"the diff of {part.path} holds a line that belongs to no change of it: {line!r:.100}")
            seen.add(b"hunk")


def _pass_hunk(head: bytes, lines: Iterator[bytes], path: str) -> None:
    counts = _HUNK.match(head)
    if not counts:
        raise ValueError(f"the diff of {path} has a hunk that can't be read: {head!r:.100}")
    old, new = (int(counts[at] or 1) for at in (1, 2))
    while old > 0 or new > 0:
        line = next(lines, None)
        if line is None or line[:1] not in (b"", b" ", b"-", b"+", b"\\"):
            raise ValueError(f"the diff of {path} has a hunk that is not whole: {head!r:.100}")
        old -= line[:1] in (b"", b" ", b"-")
        new -= line[:1] in (b"", b" ", b"+")


def paths_of(diff: bytes) -> list[str]:
    """Every path that the diff touches, old names too, in order. Raises ValueError as `split`."""
    return list(dict.fromkeys(path for part in split(diff) for path in part.paths))


def _part(data: bytes) -> Part:
    old = new = b""
    deleted = new_file = False
    lines = data.split(b"\n")
    for line in lines[1:]:
        if line.startswith((b"@@", b"GIT binary patch", b"Binary files ")):
            break
        deleted = deleted or line.startswith(b"deleted file mode")
        new_file = new_file or line.startswith(b"new file mode")
        for word in _PATH_LINES:
            if line.startswith(word):
                name = _name(line[len(word) :], strip=word in _PATH_LINES[:2])
                if word in (b"--- ", b"rename from ", b"copy from "):
                    old = old or name
                else:
                    new = new or name
    if not (old or new):
        old = new = _both(lines[0][len(HEAD) :])
    if not (old or new):
        raise ValueError(f"a part of the diff names no file: {lines[0]!r:.200}")
    named = [item for item in (new, old) if item]
    return Part(
        tuple(dict.fromkeys(item.decode("utf-8", "surrogateescape") for item in named)), data, deleted, new_file
    )


def _name(text: bytes, *, strip: bool) -> bytes:
    """A path out of a header line; empty for /dev/null."""
    text = text.rstrip(b"\r\n")
    if text.startswith(b'"'):
        text = _unquote(text)
    else:
        text = text.partition(b"\t")[0]
    if strip:
        return b"" if text == b"/dev/null" else text.partition(b"/")[2]
    return text


def _both(text: bytes) -> bytes:
    """The path out of `a/PATH b/PATH`, where nothing else names it (a new empty file, a change of mode, binary)."""
    text = text.rstrip(b"\r\n")
    if text.startswith(b'"'):
        first = re.match(rb'"(?:[^"\\]|\\.)*"', text)
        return _unquote(first.group()).partition(b"/")[2] if first else b""
    half, rest = divmod(len(text) - 1, 2)
    first_half, second_half = text[:half], text[half + 1 :]
    same = not rest and first_half.partition(b"/")[2] == second_half.partition(b"/")[2]
    return first_half.partition(b"/")[2] if same else b""


def _unquote(text: bytes) -> bytes:
    """A path as git quotes it: within double quotes, with C's escapes."""
    inner = text.strip()[1:-1]
    return _ESCAPE.sub(
        lambda found: bytes([int(found[1], 8) if found[1].isdigit() else _ESCAPED[found[1][0]]]),
        inner,
    )
