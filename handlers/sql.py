"""Questions about a SQLite database: the policy looks into it with a tool of its own, then hands in one query.

docs/walk-sql.md goes through this file.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from handlers.code.blocks import last_block
from handlers.sql_box import CELL, DatabaseFile, ask, compared, make_database, table
from handlers.tools import Over, tool
from handlers.turns import Turns
from pipeline.interfaces import Context, Message, Reward

ROWS = 30
"""Rows of one result that the policy sees."""


class Sql(Turns):
    """1.0 for a query whose result is that of the task's `gold` query, else 0.0; both run on a database made anew."""

    class Task(BaseModel):
        """`schema` (shown to the policy) and `setup` are SQL that makes the database; `database` is a file.

        Rows are compared in any order unless `ordered`; floats may differ by `tolerance`, relative or absolute.
        `seconds` of CPU time is what a query may take. A `gold` without rows is refused unless it `may_be_empty`: any
        query that finds nothing would be right.
        """

        model_config = ConfigDict(frozen=True, extra="ignore")

        question: str
        gold: str
        ddl: Annotated[str, Field(alias="schema")] = ""
        setup: str = ""
        database: DatabaseFile = b""
        ordered: bool = False
        tolerance: Annotated[float, Field(ge=0)] = 1e-6
        may_be_empty: bool = False
        seconds: Annotated[float, Field(gt=0, le=60)] = 10.0

    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "fresh"
    tools = ("query", "submit")

    async def init(self, ctx: Context) -> None:
        await make_database(ctx.sandbox, f"{ctx.task.ddl};\n{ctx.task.setup}", ctx.task.database)

    def prompt(self, task: Sql.Task) -> str:
        known = f"\n\nThe database:\n{task.ddl}" if task.ddl else "\n\nIts tables stand in sqlite_master."
        how = "Look into it with `query`. Then call `submit` with one query whose result answers the question."
        return f"{task.question}{known}\n\n{how}"

    @tool(f"Run a query and see its first {ROWS} rows. It can only read.", sql="One SELECT statement of SQLite.")
    async def query(self, ctx: Context, sql: str) -> str:
        return table(await ask(ctx.sandbox, sql, ctx.task.seconds, ROWS, CELL))

    @tool("Hand in the query that answers the question. This ends the work.", sql="One SELECT statement of SQLite.")
    async def submit(self, ctx: Context, sql: str) -> str:
        ctx.state["sql"] = sql
        return Over("handed in")

    async def eval(self, ctx: Context) -> Reward:
        sql = ctx.state.get("sql") or last_block(ctx.answer, "sql", "sqlite")
        if not sql:
            return Reward(value=0.0, parts={"correct": 0.0}, evidence={"why": "no query was handed in"})
        await self.init(ctx)
        gold = await ask(ctx.sandbox, ctx.task.gold, ctx.task.seconds)
        answer = await ask(ctx.sandbox, sql, ctx.task.seconds)
        found = await ctx.compute(compared, gold, answer, ctx.task.ordered, ctx.task.tolerance, ctx.task.may_be_empty)
        right = float(found.pop("same"))
        return Reward(value=right, parts={"correct": right}, evidence={**found, "sql": sql[:2000]})

    def gold(self, task: Sql.Task) -> list[Message]:
        calls = [{"name": name, "arguments": {"sql": task.gold}} for name in self.tools]
        said = [{"type": "function", "function": call} for call in calls]
        return [{"role": "assistant", "content": "", "tool_calls": [call]} for call in said]
