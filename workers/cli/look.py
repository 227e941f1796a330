"""Commands that look at the line and change nothing: depth, ls, show, logs, workers, dead, audit, watch."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline import inspect, letters
from pipeline.audit import audit as audit_line
from pipeline.config import Config
from pipeline.errors import TaskError
from pipeline.queue import Queue
from workers import interrupt
from workers.cli.base import Command, check_lane, json_option, line, say, settings, table
from workers.view import sandboxes, seconds, tokenizer_of

T = TypeVar("T")
STAGE = click.Choice(list(inspect.STAGES))


def read(ctx: click.Context, look: Callable[[Queue], Awaitable[T]]) -> T:
    """What `look` finds in the line."""
    settings(ctx).logs()

    async def main(config: Config) -> T:
        async with line(config) as queue:
            return await look(queue)

    return interrupt.run(main(settings(ctx).config()))


@click.command(cls=Command)
@json_option
@click.pass_context
def depth(ctx: click.Context, as_json: bool) -> None:
    """How much waits where, and how long the next in turn has waited."""
    found = read(ctx, inspect.depth)
    if as_json:
        say(found)
        return
    rows = [
        (
            stage,
            lane,
            count,
            item["place"][lane] or "",
            item["weights"][lane] or "",
            seconds(item["age"]) if count else "",
            item["leased"],
            item["delayed"],
            item["dead"],
        )
        for stage, item in found.items()
        for lane, count in item["ready"].items()
    ]
    table(("stage", "lane", "ready", "for a place", "for weights", "oldest", "leased", "delayed", "dead"), rows)
    for sentence in (why for item in found.values() for why in item["paused"].values()):
        click.echo(sentence)


@click.command(cls=Command)
@click.argument("stage", type=STAGE)
@click.option("--state", default="ready", show_default=True, type=click.Choice(list(inspect.STATES)))
@click.option("--lane", default="train", show_default=True, help="Only for --state ready and place.")
@click.option("--start", default=0, show_default=True, type=click.IntRange(min=0), help="Skip so many.")
@click.option("--count", default=50, show_default=True, type=click.IntRange(1, 10_000), help="Show so many.")
@json_option
@click.pass_context
def ls(ctx: click.Context, stage: str, state: str, lane: str, start: int, count: int, as_json: bool) -> None:
    """List rollouts of STAGE, in the order in which they will be taken."""
    check_lane(settings(ctx).config(), lane)

    async def look(queue: Queue) -> list[dict[str, Any]]:
        rows = await inspect.page(queue, stage, state, lane, start, count)
        if state == "place":
            places = await inspect.where(queue, [row["id"] for row in rows])
            rows = [{**row, "why": places[row["id"]].why if row["id"] in places else ""} for row in rows]
        return rows

    rows = read(ctx, look)
    if as_json:
        say(rows)
        return
    shown = [
        (
            row["id"],
            row["lane"],
            row["attempts"],
            row["losses"],
            seconds(row["seconds"]),
            row["owner"] if state == "leased" else "",
            _reason(row),
        )
        for row in rows
    ]
    table(
        ("id", "lane", "attempts", "losses", f"{state} for", "owner", "why"),
        shown,
        none=f"nothing waits for a place in {stage}" if state == "place" else f"nothing is {state} in {stage}",
    )


def _reason(row: dict[str, Any]) -> str:
    words = [row["outcome"], f"{row['kind']}: {row['why']}" if row["kind"] else row["why"]]
    return " ".join(filter(None, words)).partition("\n")[0][:100]


@click.command(cls=Command)
@click.argument("id")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the trajectory with its loss mask as a page.",
)
@json_option
@click.pass_context
def show(ctx: click.Context, id: str, html: Path | None, as_json: bool) -> None:
    """All about one rollout: where it is and why, every attempt, the reward, the tokens coloured by the loss mask."""
    from workers import dossier, view_rollout

    async def look(queue: Queue) -> tuple[dossier.Dossier, str]:
        return await dossier.gather(queue, id), await view_rollout.tokenizer(queue)

    found, folder = read(ctx, look)
    decode = tokenizer_of(folder)
    if html is not None:
        from workers.view_html import page

        try:
            html.write_text(page(found, decode), encoding="utf-8")
        except OSError as error:
            raise TaskError(f"{html} can't be written: {error.strerror}") from None
        click.echo(f"wrote {html}", err=True)
    if as_json:
        from workers.cli.pop import trajectory_record

        say(
            {**found.about, "attempts": found.attempts, "trajectory": trajectory_record(found.trajectory, arrays=False)}
        )
    else:
        view_rollout.show(found, decode)


@click.command(cls=Command)
@click.argument("id")
@json_option
@click.pass_context
def logs(ctx: click.Context, id: str, as_json: bool) -> None:
    """What each attempt of a rollout logged (the last 4 KB of each)."""
    from workers import dossier

    found = read(ctx, lambda queue: dossier.gather(queue, id))
    if as_json:
        say(
            [
                {name: item.get(name) for name in ("stage", "attempt", "worker", "outcome", "log")}
                for item in found.attempts
            ]
        )
        return
    for item in found.attempts:
        click.echo(
            f"== {item.get('stage')} attempt {item.get('attempt', '?')} on {item.get('worker')}: {item.get('outcome')}"
        )
        click.echo((item.get("log") or item.get("error") or "(it logged nothing)").rstrip())
    if not found.attempts:
        click.echo("no attempt yet")


@click.command(cls=Command)
@click.option("--all", "everyone", is_flag=True, help="Also the silent ones of the last hour.")
@json_option
@click.pass_context
def workers(ctx: click.Context, everyone: bool, as_json: bool) -> None:
    """Workers that live: stage, host, load, and what each says of itself."""
    found = read(ctx, lambda queue: inspect.workers(queue, 3600.0 if everyone else None))
    if as_json:
        say(found)
        return
    rows = [
        (
            item["worker"],
            item["stage"],
            item["host"],
            f"{item['running']}/{item['slots']}",
            sandboxes(item),
            seconds(time.time() - item["started"]),
            seconds(item["silent"]),
            _state(item),
        )
        for item in found
    ]
    table(
        ("worker", "stage", "host", "busy", "sandboxes", "up", "last beat", "state"),
        rows,
        none="no live worker: start one with `rollout work STAGE`",
    )


def _state(item: dict[str, Any]) -> str:
    if item.get("outdated"):
        return "too old for the line's schema: upgrade it"
    said = [name for name in ("stopping", "stalled", "memory_high") if item.get(name)]
    said += ["payload.dir is away"] if item.get("blind") else []
    if item.get("stopping") and item.get("why_stopping"):
        said[0] = f"stopping ({item['why_stopping']})"
    return ", ".join([*said, *([item["paused"]] if item.get("paused") else [])]) or "serving"


@click.command(cls=Command)
@click.option("--stage", type=click.Choice(["init", "run", "eval"]), help="Only those that died there.")
@click.option("--start", default=0, show_default=True, type=click.IntRange(min=0), help="Skip so many.")
@click.option("--count", default=50, show_default=True, type=click.IntRange(1, 10_000), help="Show so many.")
@json_option
@click.pass_context
def dead(ctx: click.Context, stage: str | None, start: int, count: int, as_json: bool) -> None:
    """Dead letters, newest first: copies of failed rollouts, kept for keep.dead_days. `rollout show ID` tells all."""
    found = read(ctx, lambda queue: letters.letters(queue, stage or "", start, count))
    if as_json:
        say([{name: getattr(item, name) for name in item.__slots__} for item in found])
        return
    rows = [
        (
            item.id,
            item.stage,
            seconds(max(0.0, time.time() - item.died)),
            item.kind,
            item.why.partition("\n")[0][:100],
            item.requeued,
        )
        for item in found
    ]
    table(("id", "died in", "ago", "kind", "why", "requeued as"), rows, none="no dead letters")


@click.command(cls=Command)
@json_option
@click.pass_context
def audit(ctx: click.Context, as_json: bool) -> None:
    """Check that nothing is lost, doubled or left over; may run while the line works. Exit 1 when something is."""
    found = read(ctx, audit_line)
    if as_json:
        say(found)
    else:
        for finding in found:
            click.echo(finding)
        if not found:
            click.echo("the line is sound")
    ctx.exit(1 if found else 0)


@click.command(cls=Command)
@click.option("--once", is_flag=True, help="Show it once and end.")
@json_option
@click.pass_context
def watch(ctx: click.Context, once: bool, as_json: bool) -> None:
    """See the line live, twice a second: depths, rates, workers, the latest rewards. Ctrl-C ends it.

    It stays while Redis is away, and says so.
    """
    from workers import view_watch

    settings(ctx).logs()
    config = settings(ctx).config()
    interrupt.run(view_watch.watch(lambda: line(config), once=once or as_json, as_json=as_json))
