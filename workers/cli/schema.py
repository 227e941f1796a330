"""`rollout schema`: the number of the line's message format, who reads which, and its raise after an upgrade."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipeline.config import Config
from pipeline.envelope import READS, SCHEMA
from pipeline.line_schema import Member, members, package_version, raise_schema
from workers import interrupt
from workers.cli.base import Command, Group, complain, json_option, line, say, settings, table
from workers.view import seconds


@click.group(cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def schema(ctx: click.Context, as_json: bool) -> None:
    """The line's schema, what this version reads, and what each living worker and client reads.

    Newer versions work on an older line, and write what it reads, until `rollout schema raise`.
    """
    if ctx.invoked_subcommand is not None:
        return
    settings(ctx).logs()
    number, found = interrupt.run(_look(settings(ctx).config()))
    if as_json:
        say(
            {
                "line": number,
                "version": package_version(),
                "writes": SCHEMA,
                "reads": READS,
                "members": [asdict(item) for item in found],
            }
        )
        return
    _show(number, found)
    if number is not None and number < SCHEMA:
        old = _too_old(found)
        click.echo(
            f"{len(old)} of {len(found)} do not read schema {SCHEMA} yet: upgrade them, then `rollout schema raise`"
            if old
            else f"all read schema {SCHEMA}: `rollout schema raise` lets the line have it"
        )


@schema.command("raise", cls=Command)
@click.option("--force", is_flag=True, help="Also while some do not read it: they take nothing more from the line.")
@json_option
@click.pass_context
def raise_(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Raise the line's schema to this version's. There is no way back, and it costs nothing while all read it."""
    settings(ctx).logs()
    before, now, old = interrupt.run(_raise(settings(ctx).config(), force))
    if as_json:
        say({"before": before, "now": now, "too_old": [asdict(item) for item in old]})
    elif now == before:
        click.echo(f"the line has schema {now}" if not old else f"the line keeps schema {now}")
    else:
        click.echo(f"the line has schema {now} now (before: {'none' if before is None else before})")
    if not old:
        return
    table(("too old", "kind", "version", "reads", "last heard"), [_row(item) for item in old])
    if now == SCHEMA:
        complain(
            f"{len(old)} do not read schema {SCHEMA}: they claim nothing more. Workers of a version before schema 2 "
            "end with an error, and what they had in work is done again. End such trainers now: by groups or ids "
            "they would pop newer rollouts as failed ones, kind envelope"
        )
        return
    complain(
        f"not raised: {len(old)} do not read schema {SCHEMA}. Upgrade or end them (a trainer of a version before "
        "schema 2 counts for an hour after its last pop), or say --force"
    )
    ctx.exit(1)


async def _look(config: Config) -> tuple[int | None, list[Member]]:
    async with line(config) as queue:
        return await queue.look_at_schema(), await members(queue)


async def _raise(config: Config, force: bool) -> tuple[int | None, int | None, list[Member]]:
    """(the number before, the number now, who does not read this version's)."""
    async with line(config) as queue:
        before = await queue.look_at_schema()
        if before == SCHEMA:
            return before, before, []
        old = _too_old(await members(queue))
        if old and not force:
            return before, before, old
        return before, await raise_schema(queue, SCHEMA), old


def _too_old(found: list[Member]) -> list[Member]:
    return [item for item in found if item.reads < SCHEMA]


def _show(number: int | None, found: list[Member]) -> None:
    has = f"schema {number}" if number is not None else "no schema yet (the first process gives it its own)"
    click.echo(f"the line has {has}; this version ({package_version()}) reads {READS}")
    table(("name", "kind", "version", "reads", "last heard"), [_row(item) for item in found], none="nobody lives here")


def _row(item: Member) -> tuple[str, ...]:
    return (item.name, item.kind, item.version or "older", f"up to {item.reads}", seconds(item.silent))
