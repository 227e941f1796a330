"""What the `sql` family needs beside its class: SQLite in a sandbox reached from outside, and results compared.

The sandbox's own python3 has SQLite; `sql_inside.py` runs there, and its answers come back as JSON files.
"""

from __future__ import annotations

import base64
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from pipeline.errors import SandboxError, TaskError
from pipeline.interfaces import Sandbox

FOLDER = ".sql"
DATABASE = f"{FOLDER}/task.db"
SETUP_SECONDS = 60.0
ROWS = 100_000
"""Rows of a result that are compared; a right answer with more is refused with the task."""

CELL = 200
"""Characters of one value that the policy sees."""

SHOWN = 300
"""Characters of the first rows that the evidence holds."""

LARGEST = 500
"""Rows that differ in their floats alone, up to which every pairing of them is tried."""

Row = list[Any]


def _file(value: Any) -> Any:
    if isinstance(value, bytes) and value.startswith(b"SQLite format 3\0"):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise ValueError("it is neither a SQLite file nor one as base64") from None


DatabaseFile = Annotated[bytes, BeforeValidator(_file)]
"""A SQLite file in a task: its bytes, or their base64."""


async def make_database(sandbox: Sandbox | None, setup: str, database: bytes = b"") -> None:
    """Build the database anew. Raises TaskError when its SQL or its file is wrong, SandboxError."""
    sandbox = _there(sandbox)
    try:
        await sandbox.write(f"{FOLDER}/inside.py", Path(__file__).with_name("sql_inside.py").read_bytes())
        await sandbox.write(DATABASE, database)
    except (OSError, ValueError) as error:
        raise SandboxError(f"the database can't be put into the sandbox: {error}") from error
    made = json.loads(await _call(sandbox, "make", setup=setup, kept=bool(database), seconds=SETUP_SECONDS))
    if made["error"]:
        raise TaskError(f"SQLite refuses the task's database (`schema`, `setup`, `database`): {made['error']}")


async def ask(sandbox: Sandbox | None, sql: str, seconds: float, rows: int = ROWS, cell: int = 0) -> bytes:
    """Run one query that can only read: JSON of `columns`, `rows`, `more`, or `error` with what SQLite says.

    `seconds` of CPU time; `rows` at most. Raises SandboxError when there is no SQLite in the sandbox.
    """
    return await _call(_there(sandbox), "ask", sql=sql, seconds=seconds, rows=rows, cell=cell)


def _there(sandbox: Sandbox | None) -> Sandbox:
    if sandbox is None:
        raise SandboxError("there is no sandbox here, which the database would be in")
    return sandbox


async def _call(sandbox: Sandbox, act: str, **request: Any) -> bytes:
    request["path"] = "task.db"
    await sandbox.write(f"{FOLDER}/request", json.dumps(request).encode())
    ran = await sandbox.bash(f"(cd ~/{FOLDER} && rm -f result && exec python3 -I inside.py {act} request result) 2>&1")
    if ran.exit_code == 0:
        return await sandbox.read(f"{FOLDER}/result")
    if ran.timed_out or (ran.exit_code or 0) > 128:
        return json.dumps({"error": "SQLite was ended: it took too much time or memory"}).encode()
    raise SandboxError(f"the sandbox can't use SQLite by its python3: {ran.text[-1000:]}")


def table(result: bytes) -> str:
    """A result as the policy sees it."""
    read = json.loads(result)
    if read["error"]:
        return f"Error: {read['error']}"
    lines = [" | ".join(map(_cell, row)) for row in [read["columns"], *read["rows"]]]
    lines.append("[there are more rows]" if read["more"] else f"[rows: {len(read['rows'])}]")
    return "\n".join(lines)


def compared(gold: bytes, answer: bytes, ordered: bool, tolerance: float, may_be_empty: bool = True) -> dict[str, Any]:
    """Whether two results are the same: `same`, `why`, how many rows each has. Raises TaskError for a bad `gold`."""
    right, said = json.loads(gold), json.loads(answer)
    if right["error"] or right["more"]:
        raise TaskError(f"the task's `gold` query fails: {right['error'] or f'it gives more than {ROWS} rows'}")
    if not right["rows"] and not may_be_empty:
        raise TaskError(
            "the task's `gold` query gives no row: any query that finds nothing would be right. Change the data, or "
            "set `may_be_empty`"
        )
    if said["error"]:
        return {"same": False, "why": f"the query fails: {said['error']}"}
    counts = {"rows": len(said["rows"]), "gold_rows": len(right["rows"])}
    widths = len(said["columns"]), len(right["columns"])
    why = ""
    if widths[0] != widths[1]:
        why = f"it gives {widths[0]} columns, wanted are {widths[1]}"
    elif said["more"] or counts["rows"] != counts["gold_rows"]:
        why = f"it gives {'more than ' * said['more']}{counts['rows']} rows, wanted are {counts['gold_rows']}"
    elif ordered:
        pairs = enumerate(zip(said["rows"], right["rows"], strict=True), 1)
        wrong = next((at for at, pair in pairs if not same_row(*pair, tolerance)), 0)
        why = f"row {wrong} differs (the order counts)" if wrong else ""
    elif not same_rows(said["rows"], right["rows"], tolerance):
        why = "the rows differ"
    if not why:
        return {"same": True, "why": "the same rows", **counts}
    first = {"first_rows": str(said["rows"][:3])[:SHOWN], "gold_first_rows": str(right["rows"][:3])[:SHOWN]}
    return {"same": False, "why": why, **counts, **first}


def same_rows(said: list[Row], right: list[Row], tolerance: float) -> bool:
    """Whether two lists hold the same rows, in any order: each row of one has a partner of its own in the other."""
    groups: dict[Any, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    inexact = {at for row in [*said, *right] for at, value in enumerate(row) if isinstance(value, float)}
    for side, rows in enumerate((said, right)):
        for row in rows:
            key = tuple("number" if at in inexact and _is_number(v) else _key(v) for at, v in enumerate(row))
            groups[key][side].append([row[at] for at in sorted(inexact) if _is_number(row[at])])
    return all(len(one) == len(other) and _paired(one, other, tolerance) for one, other in groups.values())


def same_row(said: Row, right: Row, tolerance: float) -> bool:
    """Whether two rows of one length hold the same values: 1 is 1.0, NULL is NULL, '1' is not 1."""
    return all(_same(*pair, tolerance) for pair in zip(said, right, strict=True))


def _paired(said: list[Row], right: list[Row], tolerance: float) -> bool:
    """Whether each row of floats has a partner. Sorted ones fit at once, unless the tolerance mixes their order."""
    said, right = sorted(said), sorted(right)
    if all(same_row(*pair, tolerance) for pair in zip(said, right, strict=True)):
        return True
    if len(said) > LARGEST:
        return False
    partner: dict[int, int] = {}

    def finds(mine: int, seen: set[int]) -> bool:
        for at, row in enumerate(right):
            if at not in seen and same_row(said[mine], row, tolerance):
                seen.add(at)
                if at not in partner or finds(partner[at], seen):
                    partner[at] = mine
                    return True
        return False

    return all(finds(mine, set()) for mine in range(len(said)))


def _same(said: Any, right: Any, tolerance: float) -> bool:
    if isinstance(said, float) or isinstance(right, float):
        if not (_is_number(said) and _is_number(right)):
            return False
        return said == right or math.isclose(said, right, rel_tol=tolerance, abs_tol=tolerance)
    return type(said) is type(right) and bool(said == right)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _key(value: Any) -> Any:
    return (type(value).__name__, value["blob"] if isinstance(value, dict) else value)


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value)
