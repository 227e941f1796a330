"""What the commands that read a task file share: which rows of it, as what, and the tasks put aside once checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeline.config import Config
from pipeline.datasets import Chosen, Reader, Spool, mapping_of
from workers import jsonl

F = TypeVar("F", bound=Callable[..., Any])


class Range(click.ParamType[tuple[int, int | None]]):
    """A:B, both counted from 0, B not included; either may be left out."""

    name = "A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        found = re.fullmatch(r"(\d*):(\d*)", str(value))
        if found is None:
            self.fail(f"{value!r} is no range: wanted A:B, as 0:100, 100: or :100", param, ctx)
        start, stop = int(found[1] or 0), int(found[2]) if found[2] else None
        if stop is not None and stop <= start:
            self.fail(f"{value!r} holds no row: B must be above A", param, ctx)
        return start, stop


OPTIONS = (
    click.option("--handler", metavar="NAME", help="Handler of rows that name none (a built-in name or module:Class)."),
    click.option("--dataset", metavar="NAME", help="A mapping of columns: a section of `datasets` in the settings."),
    click.option("--rows", type=Range(), metavar="A:B", help="Only the rows from A to before B, counted from 0."),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N tasks."),
    click.option("--shuffle", type=int, metavar="SEED", help="The rows in the order that SEED draws."),
    click.option("--once", is_flag=True, help="Of rows with the same id take the first; otherwise they are an error."),
)


def row_options(function: F) -> F:
    """The options by which a command chooses rows; they come as `handler` and `rows`, `limit`, ..."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def put_aside(spool: Spool, file: str, config: Config, *, check: bool = True, **chosen: Any) -> None:
    """Read the chosen tasks of a file (`-`: stdin), check each, put all into `spool`; warns of what went unchecked.

    `chosen`: the values of `row_options`. Raises TaskError, UnknownHandler, ConfigError.
    """
    from workers.workshop import handlers_path

    checker = jsonl.Checker(handlers_path(config), check=check)
    mapping = mapping_of(config, chosen["dataset"]) if chosen["dataset"] else None
    start, stop = chosen["rows"] or (0, None)
    rows = Chosen(start=start, stop=stop, limit=chosen["limit"], shuffle=chosen["shuffle"])
    for task in jsonl.stream(file, Reader(mapping, chosen["handler"], checker.check, chosen["once"]), rows):
        spool.add(task)
    for sentence in checker.skipped:
        click.echo(f"Warning: {sentence}", err=True)
