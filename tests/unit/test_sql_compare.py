"""Results of two queries compared; and the page docs/walk-sql.md, which quotes the handler as it is."""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.sql_box import compared, table
from pipeline.errors import TaskError

ROOT = Path(__file__).parents[2]


def result(*rows: list[Any], columns: int = 0, **about: Any) -> bytes:
    names = [f"c{at}" for at in range(columns or len(rows[0]) if rows else columns or 1)]
    return json.dumps({"columns": names, "rows": rows, "more": False, "error": "", **about}).encode()


@pytest.mark.parametrize(
    ("gold", "answer", "ordered", "tolerance", "same"),
    [
        ([[1], [2]], [[2], [1]], False, 0, True),
        ([[1], [2]], [[2], [1]], True, 0, False),
        ([[1], [2]], [[1], [2]], True, 0, True),
        ([[1], [1], [2]], [[1], [2], [2]], False, 0, False),
        ([[1]], [[1.0]], False, 0, True),
        ([[1]], [["1"]], False, 0, False),
        ([[None]], [[None]], False, 0, True),
        ([[None]], [[0]], False, 0, False),
        ([[None]], [[0.0]], False, 1, False),
        ([[""]], [[None]], False, 0, False),
        ([[0.1]], [[0.1000001]], False, 1e-6, True),
        ([[0.1]], [[0.11]], False, 1e-6, False),
        ([["a", 0.1], ["b", 0.1]], [["b", 0.1], ["a", 0.1]], False, 0, True),
        ([["a", 0.1], ["b", 0.2]], [["a", 0.2], ["b", 0.1]], False, 1e-6, False),
        # Sorted by the first float the rows would meet the wrong partners.
        ([[1.0, 5.0], [1.0000001, 2.0]], [[1.0000001, 5.0], [1.0, 2.0]], False, 1e-6, True),
        ([[1.0, 5.0], [1.0000001, 2.0]], [[1.0000001, 5.0], [1.0, 5.0]], False, 1e-6, False),
        ([[2**53 + 1]], [[2**53]], False, 0, False),
        ([[1, 2.5]], [[1, 2.5]], False, 0, True),
        ([[1], [2.5]], [[2.5], [1]], False, 0, True),
        ([[1], [2.5]], [[2.5], ["1"]], False, 0, False),
        ([[{"blob": "61"}]], [["a"]], False, 0, False),
        ([[{"blob": "61"}]], [[{"blob": "61"}]], False, 0, True),
        ([[float("inf")]], [[float("inf")]], False, 1e-6, True),
    ],
)
def test_rows(gold: list[Any], answer: list[Any], ordered: bool, tolerance: float, same: bool) -> None:
    found = compared(result(*gold), result(*answer), ordered, tolerance)
    assert found["same"] == same, found["why"]
    assert (found["rows"], found["gold_rows"]) == (len(answer), len(gold))


def test_why_not() -> None:
    one = result([1])
    assert compared(one, result([1, 2]), False, 0)["why"] == "it gives 2 columns, wanted are 1"
    assert compared(one, result([1], [1]), False, 0)["why"] == "it gives 2 rows, wanted are 1"
    assert compared(one, result([1], more=True), False, 0)["why"] == "it gives more than 1 rows, wanted are 1"
    assert compared(one, result([2]), True, 0)["why"] == "row 1 differs (the order counts)"
    assert compared(one, b'{"error": "no such table: x"}', True, 0)["why"] == "the query fails: no such table: x"
    assert compared(one, result([2]), False, 0)["first_rows"] == "[[2]]"
    assert compared(result(columns=2), result(columns=2), False, 0)["same"]
    assert not compared(result(columns=2), result(columns=1), False, 0)["same"]
    with pytest.raises(TaskError, match="gives no row"):
        compared(result(columns=2), result(columns=2), False, 0, may_be_empty=False)


@pytest.mark.parametrize("gold", [b'{"error": "no such table: x"}', result([1], more=True)])
def test_a_gold_that_fails_is_the_tasks_fault(gold: bytes) -> None:
    with pytest.raises(TaskError, match="the task's `gold` query fails"):
        compared(gold, result([1]), False, 0)


def test_many_rows_are_compared_soon() -> None:
    rows = [[number % 7, number / 3] for number in range(20_000)]
    began = time.process_time()
    assert compared(result(*rows), result(*reversed(rows)), False, 1e-6)["same"]
    assert not compared(result(*rows), result(*rows[1:], [0, -1.0]), False, 1e-6)["same"]
    assert time.process_time() - began < 3


def test_what_the_policy_sees() -> None:
    assert table(result([1, None])) == "c0 | c1\n1 | NULL\n[rows: 1]"
    assert table(result([1], more=True)).endswith("[there are more rows]")
    assert table(b'{"error": "no such table: x"}') == "Error: no such table: x"


def test_a_database_is_bytes_or_base64() -> None:
    handler = handlers.load("handlers.sql:Sql")
    file = b"SQLite format 3\0 and so on"
    for given in (file, base64.b64encode(file).decode(), base64.b64encode(file)):
        task = handlers.check_task(handler, {"question": "q", "gold": "SELECT 1", "database": given})
        assert task.database == file
    with pytest.raises(TaskError, match="neither a SQLite file nor one as base64"):
        handlers.check_task(handler, {"question": "q", "gold": "SELECT 1", "database": "not this"})


def test_the_page_quotes_the_handler_whole() -> None:
    source = (ROOT / "handlers" / "sql.py").read_text(encoding="utf-8")
    pieces = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "walk-sql.md").read_text(encoding="utf-8"), re.DOTALL)
    places = [source.find(piece) for piece in pieces]
    assert -1 not in places and places == sorted(places)
    left = source
    for piece in pieces:
        left = left.replace(piece, "", 1)
    assert not left.strip(), "every line of the file stands on the page"
    code = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith(("#", '"""'))]
    assert len(code) < 75
