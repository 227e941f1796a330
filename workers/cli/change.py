"""Commands that change what is in the line: cancel, requeue."""

from __future__ import annotations

import asyncio
from collections import Counter

import click

from pipeline import letters
from pipeline.config import Config
from pipeline.errors import LineError
from pipeline.queue import Queue
from workers import interrupt
from workers.cli.base import Command, check_lane, complain, json_option, line, say, settings

MEANING = {
    "REMOVED": "waited and ended at once", "ASKED": "in work: the worker was told", "DONE": "had ended already",
    "NONE": "unknown",
}  # fmt: skip


@click.command(cls=Command)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--group", metavar="G", help="All members of a group.")
@click.option("--lane", metavar="L", help="All of a lane.")
@click.option("--all", "everything", is_flag=True, help="All of the line.")
@json_option
@click.pass_context
def cancel(
    ctx: click.Context, ids: tuple[str, ...], group: str | None, lane: str | None, everything: bool, as_json: bool
) -> None:
    """Cancel rollouts. Each still ends in a record (`cancelled`) that the trainer pops, so its group completes."""
    if sum((bool(ids), group is not None, lane is not None, everything)) != 1:
        raise click.UsageError("say which: ID..., --group G, --lane L or --all")
    settings(ctx).logs()
    config = settings(ctx).config()
    if lane is not None:
        check_lane(config, lane)
    replies = interrupt.run(_cancel(config, list(ids), group, lane))
    counted = Counter(replies.values())
    if as_json:
        say({"counts": {name: counted[name] for name in MEANING}, "replies": replies})
    else:
        for name, count in sorted(counted.items()):
            click.echo(f"{count} {MEANING.get(name, name)}")
        if not replies:
            click.echo("nothing to cancel")
    unknown = [id for id, reply in replies.items() if reply == "NONE"]
    if ids and unknown:
        complain(f"no record of {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}")
    if group is not None and not replies:
        complain(f"there is no group {group}")
    ctx.exit(1 if (ids and unknown) or (group is not None and not replies) else 0)


async def _cancel(config: Config, ids: list[str], group: str | None, lane: str | None) -> dict[str, str]:
    async with line(config) as queue:
        if group is not None:
            ids = sorted(item.decode() for item in await queue.execute("SMEMBERS", queue.key("m", group)))
        elif not ids:
            ids = await _working(queue, lane)
        return dict(zip(ids, await queue.cancel(ids, "cancelled from the command line"), strict=True))


async def _working(queue: Queue, lane: str | None) -> list[str]:
    """Rollouts that have not ended, of a lane or of all. A scan: nothing that is there all the time is missed."""
    start = len(queue.key("r", ""))
    ids: list[str] = []
    cursor = b"0"
    while True:
        cursor, keys = await queue.execute("SCAN", cursor, "MATCH", queue.key("r", "*"), "COUNT", 1000)
        rows = await asyncio.gather(*(queue.execute("HMGET", key, "stage", "lane") for key in keys))
        for key, (stage, of) in zip(keys, rows, strict=True):
            if stage and stage != b"done" and (lane is None or of == lane.encode()):
                ids.append(key.decode()[start:])
        if int(cursor) == 0:
            return sorted(set(ids))


@click.command(cls=Command)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="All dead letters that were not requeued yet.")
@click.option("--again", is_flag=True, help="Also those that were.")
@json_option
@click.pass_context
def requeue(ctx: click.Context, ids: tuple[str, ...], everything: bool, again: bool, as_json: bool) -> None:
    """Make new rollouts of dead letters: the same task in a group of its own, with `retry_of` the old id."""
    if bool(ids) == everything:
        raise click.UsageError("say which: ID... or --all")
    settings(ctx).logs()
    made, failed = interrupt.run(_requeue(settings(ctx).config(), list(ids), again))
    if as_json:
        say({"requeued": made, "failed": failed})
    else:
        for old, new in made.items():
            click.echo(f"{old} -> {new}")
        if not made and not failed:
            click.echo("no dead letters to requeue")
    for sentence in failed.values():
        complain(sentence)
    ctx.exit(1 if failed else 0)


async def _requeue(config: Config, ids: list[str], again: bool) -> tuple[dict[str, str], dict[str, str]]:
    """(old id -> new id, old id -> why not). All are tried, whatever becomes of one."""
    made: dict[str, str] = {}
    failed: dict[str, str] = {}
    async with line(config) as queue:
        if not ids:
            known = await letters.letters(queue, count=1_000_000)
            ids = [item.id for item in reversed(known) if again or not item.requeued]
        for id in ids:
            try:
                made[id] = await letters.requeue(queue, id, again=again)
            except LineError as error:
                failed[id] = str(error)
    return made, failed
