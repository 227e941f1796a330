"""Makes docs/redis-keys.md from the head of pipeline/queue.py: `make docs`. A test compares the two."""

import ast
import re
import sys
from pathlib import Path

HEAD = """# Keys in Redis

Made from the head of [pipeline/queue.py](../pipeline/queue.py) by `make docs`: change that, not this page.

Every key begins with the line's prefix, its name in braces: `{rollout}:r:math-1.0`. The braces are a hash tag, so all
keys of one line live on one primary. Capital letters stand for a value: `ID` is a rollout's id (`GROUP.SAMPLE`),
`STAGE` one of init, run, eval, done, `LANE` one of `line.lanes`. A key lives until the last ack of its rollout or group
unless its row says otherwise. Only the code in `pipeline/` and its Lua scripts writes here; to look, use `rollout
show`, `ls` and `audit`.

| key | type | what it holds, and how long |
|---|---|---|
"""
TAIL = """
An empty line keeps `schema`, `seq`, `counts`, `files`, `tick`, and the keys that end by themselves (letters,
tombstones, workers, claims, doorbells). `rollout audit` finds what is left over without an owner.
"""
TYPES = "hash, zset|strings?|counter|hash|lists?|set|zset"
ROW = re.compile(rf"^    (?P<key>\S.*?)\s+(?P<type>{TYPES})\s{{2,}}(?P<what>\S.*)$")


def rows(text: str) -> list[tuple[str, str, str]]:
    """(key, type, what) for each line of the table in the docstring; further lines belong to the one before."""
    found: list[tuple[str, str, str]] = []
    for line in (ast.get_docstring(ast.parse(text), clean=False) or "").splitlines():
        match = ROW.match(line)
        if match:
            found.append((match["key"], match["type"], match["what"].strip()))
        elif found and line.startswith(" " * 12):
            key, kind, what = found[-1]
            found[-1] = (key, kind, f"{what} {line.strip()}")
    return found


def page(text: str) -> str:
    """The page for the source of pipeline/queue.py."""
    lines = [
        f"| `{key.replace(', ', '`, `')}` | {kind} | {what.replace('|', ' or ')} |\n" for key, kind, what in rows(text)
    ]
    return HEAD + "".join(lines) + TAIL


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.stdout.write(page((root / "pipeline" / "queue.py").read_text(encoding="utf-8")))
