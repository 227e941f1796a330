"""The `sql` family in a real sandbox: what its tool shows and refuses, and how a handed-in query is scored."""

from __future__ import annotations

import base64
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import handlers
from pipeline.errors import SandboxError, TaskError
from pipeline.interfaces import Context, Reward, ToolCall
from tests.boxes import Site
from tests.sessions import boxed, image_cache, make, short_root, site
from workers.sandbox.tools.session import Session

__all__ = ["boxed", "image_cache", "short_root", "site"]

PETS: dict[str, Any] = {
    "question": "Which cats are there?",
    "schema": "CREATE TABLE pets (name TEXT, kind TEXT, weight REAL)",
    "setup": "INSERT INTO pets VALUES ('Tom', 'cat', 4.5), ('Rex', 'dog', 20), ('Kit', 'cat', NULL)",
    "gold": "SELECT name, weight FROM pets WHERE kind = 'cat'",
    "seconds": 0.2,
}
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
HANDLER: Any = handlers.load("handlers.sql:Sql")


async def opened(sandbox: Session, **changes: Any) -> Context:
    ctx = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, sandbox=sandbox,
        task=handlers.check_task(HANDLER, {**PETS, **changes}), log=logging.LoggerAdapter(logging.getLogger("test")),
    )  # fmt: skip
    await HANDLER.init(ctx)
    return ctx


async def scored(ctx: Context, sql: str) -> Reward:
    ctx.state["sql"] = sql
    reward = await HANDLER.eval(ctx)
    assert isinstance(reward, Reward)
    return reward


async def test_the_tool_shows_rows_and_lets_nothing_be_written(boxed: Session, tmp_path: Path) -> None:
    ctx = await opened(boxed)

    async def shown(sql: str) -> str:
        return str((await HANDLER.use(ctx, ToolCall("1", "query", {"sql": sql})))["content"])

    assert await shown("SELECT * FROM pets ORDER BY name") == (
        "name | kind | weight\nKit | cat | NULL\nRex | dog | 20.0\nTom | cat | 4.5\n[rows: 3]"
    )
    assert "CREATE TABLE pets" in await shown("SELECT sql FROM sqlite_master")
    assert "weight" in await shown("PRAGMA table_info(pets)")
    assert await shown("SELECT value FROM json_each('[7]')") == "value\n7\n[rows: 1]"
    assert "may not be modified" in await shown("UPDATE sqlite_master SET sql = ''")
    many = await shown("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n")
    assert many.endswith("\n29\n30\n[there are more rows]")
    long = await shown("SELECT hex(zeroblob(100000))")
    assert len(long) < 300
    refused = "Error: a query can only read: no writing, no ATTACH, no settings"
    for sql in (
        "INSERT INTO pets VALUES ('x', 'cat', 1)", "DROP TABLE pets", "CREATE TEMP TABLE t (x)", "DELETE FROM pets",
        "ATTACH '/tmp/other.db' AS other", "PRAGMA query_only = 0", "PRAGMA writable_schema = 1", "BEGIN", "VACUUM",
        "SELECT load_extension('x')", "VACUUM INTO '/tmp/copy.db'",
    ):  # fmt: skip
        assert await shown(sql) == refused, sql
    for sql, said in (
        ("SELECT * FROM cats", "no such table: cats"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT 1; DROP TABLE pets", "one statement at a time"),
        ("", "no query"),
        ("-- nothing", "no query"),
        (ENDLESS, "it took more than 0.2 s of CPU time"),
        ("SELECT '\ud800'", ""),
    ):
        text = await shown(sql)
        assert text.startswith("Error: ") and said in text, (sql, text)
    assert await shown("SELECT count(*) FROM pets") == "count(*)\n3\n[rows: 1]"
    wrong = await HANDLER.use(ctx, ToolCall("1", "query", {"q": 1}))
    assert "query wants `sql`" in wrong["content"]


async def test_scores(boxed: Session) -> None:
    ctx = await opened(boxed)
    for sql, value, why in (
        (PETS["gold"], 1.0, "the same rows"),
        ("SELECT name, weight FROM pets WHERE kind LIKE 'C%' ORDER BY 1;", 1.0, "the same rows"),
        ("SELECT 'Kit', NULL UNION ALL SELECT 'Tom', 4.5000001", 1.0, "the same rows"),
        ("SELECT weight, name FROM pets WHERE kind = 'cat'", 0.0, "the rows differ"),
        ("SELECT name FROM pets WHERE kind = 'cat'", 0.0, "it gives 1 columns, wanted are 2"),
        ("SELECT name, weight FROM pets", 0.0, "it gives 3 rows, wanted are 2"),
        ("SELECT name, weight FROM cats", 0.0, "the query fails: no such table: cats"),
        ("DELETE FROM pets", 0.0, "the query fails: a query can only read"),
        (ENDLESS, 0.0, "the query fails: it took more than 0.2 s of CPU time"),
        ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x, x FROM n", 0.0, "more than"),
        ("SELECT hex(zeroblob(20000000)), 1", 0.0, "the query fails"),
    ):
        reward = await scored(ctx, sql)
        assert reward.value == value == reward.parts["correct"], (sql, reward)
        assert why in reward.evidence["why"], (sql, reward.evidence)
        assert reward.evidence["sql"] == sql
    ctx.state = {"answer": f"It is\n```sql\n{PETS['gold']}\n```"}
    assert (await HANDLER.eval(ctx)).value == 1.0
    ctx.state = {"answer": "I don't know."}
    assert (await HANDLER.eval(ctx)).evidence == {"why": "no query was handed in"}


async def test_order_counts_where_the_task_says_so(boxed: Session) -> None:
    gold = "SELECT name FROM pets ORDER BY name"
    ctx = await opened(boxed, gold=gold, ordered=True)
    assert (await scored(ctx, gold)).value == 1.0
    assert (await scored(ctx, f"{gold} DESC")).value == 0.0


async def test_a_database_file(boxed: Session, tmp_path: Path) -> None:
    """Also one that is written with a write-ahead log."""
    connection = sqlite3.connect(tmp_path / "x.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (7), (8)")
    connection.close()
    file = base64.b64encode((tmp_path / "x.db").read_bytes()).decode()
    ctx = await opened(boxed, schema="", setup="INSERT INTO t VALUES (9)", database=file, gold="SELECT sum(x) FROM t")
    assert "sqlite_master" in HANDLER.prompt(ctx.task)
    assert (await scored(ctx, "SELECT 24")).value == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"setup": "INSERT INTO absent VALUES (1)"}, "no such table: absent"),
        ({"database": base64.b64encode(b"no database" * 100).decode()}, "file is not a database"),
    ],
)
async def test_a_database_that_can_not_be_made_is_the_tasks_fault(
    boxed: Session, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskError, match=f"SQLite refuses the task's database.*{said}"):
        await opened(boxed, **changes)


@pytest.mark.parametrize(("gold", "said"), [("SELECT x FROM pets", "no such column: x"), (ENDLESS, "more than 0.2 s")])
async def test_a_gold_that_fails_is_the_tasks_fault(boxed: Session, gold: str, said: str) -> None:
    ctx = await opened(boxed, gold=gold)
    with pytest.raises(TaskError, match=f"the task's `gold` query fails: .*{said}"):
        await scored(ctx, "SELECT 1")


async def test_a_sandbox_without_python_is_no_score(site: Site) -> None:
    session, _ = await make(site, "bubblewrap")
    ctx = await opened(session)
    await session.bash("PATH=/nowhere:/bin")
    await session.bash("enable -n rm; rm() { :; }; python3() { return 127; }; export -f rm python3; PATH=/nowhere")
    with pytest.raises(SandboxError, match="can't use SQLite"):
        await scored(ctx, "SELECT 1")
