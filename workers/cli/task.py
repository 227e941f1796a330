"""`rollout task`: what is done with tasks before they are enqueued."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from pipeline.config import Config
from pipeline.datasets import Spool
from pipeline.envelope import Task
from pipeline.errors import TaskError
from workers import interrupt
from workers.cli.base import Command, Group, json_option, say, settings
from workers.cli.rows import put_aside, row_options


@click.group(cls=Group)
def task() -> None:
    """Tasks, before they are enqueued."""


@task.command(cls=Command)
@click.argument("file", metavar="FILE|-")
@row_options
@click.option("--only", multiple=True, metavar="ID", help="Only the task with this id. May be repeated.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Tasks at once (default: the cores).")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(min=1), help="Plays of each gold.")
@click.option("--passes", default=1.0, show_default=True, metavar="REWARD", help="The least reward of a right answer.")
@click.option(
    "--write", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the tasks that are ok, each with what was found, as JSON lines for `rollout enqueue`.",
)  # fmt: skip
@json_option
@click.pass_context
def validate(
    ctx: click.Context, /, file: str, only: tuple[str, ...], jobs: int | None, repeat: int, passes: float,
    write: Path | None, as_json: bool, **chosen: Any,
) -> None:  # fmt: skip
    """Check for each task of FILE that its right answer passes here, and that an empty one fails.

    Needs no Redis and no policy: each answer is played as a rollout in this process, with its own sandbox. Verdicts:
    ok, gold fails, unsteady (only some of --repeat plays pass), empty passes, no gold, error (the machine's or the
    task's fault; tried twice). Exit 1 unless all are ok.
    """
    settings(ctx).logs("error")
    config = settings(ctx).config()
    with Spool() as spool:
        put_aside(spool, file, config, check=False, **chosen)  # wrong data is a verdict of that task alone
        tasks = [task for task in spool.tasks() if not only or task.id in only]
    missing = sorted(set(only) - {task.id for task in tasks})
    if missing:
        raise TaskError(f"{file} holds no task with the id {missing[0]!r}")
    if write is not None:
        _check_written(write, tasks)
    about = {"jobs": jobs or len(os.sched_getaffinity(0)), "repeat": repeat, "passes": passes}
    found: list[Any] = []
    try:
        interrupt.run(_validate(config, tasks, found, as_json, about), (signal.SIGINT, signal.SIGTERM))
    finally:
        if write is not None:
            _write(write, config, tasks, found)
    ctx.exit(0 if all(verdict.verdict == "ok" for verdict in found) else 1)


async def _validate(config: Config, tasks: list[Task], found: list[Any], as_json: bool, about: dict[str, Any]) -> None:
    """`found` takes the verdicts as they come, so that what is known outlives an interrupt."""
    from workers import view_validate
    from workers.validate import opened, validate as find

    began = time.monotonic()
    ids = [task.id or f"task-{number}" for number, task in enumerate(tasks)]
    live = nullcontext() if as_json else view_validate.Live(ids)

    def heard(verdict: Any) -> None:
        found.append(verdict)
        if isinstance(live, view_validate.Live):
            live.found(verdict)

    try:
        async with opened(config) as shop:
            with live:
                await find(shop, tasks, found=heard, **about)
    finally:
        found.sort(key=lambda verdict: verdict.number)
        took = time.monotonic() - began
        if as_json:
            counts = view_validate.counted(found)
            said = {"tasks": len(tasks), "seconds": round(took, 3), **counts}
            say({**said, "results": [verdict.record() for verdict in found]})
        else:
            click.echo(view_validate.summed_up(found, len(tasks), took))


def _check_written(file: Path, tasks: list[Task]) -> None:
    """Raises TaskError where the tasks can't be written: before the work, not after it."""
    from pipeline.task_lines import line_of

    for item in tasks:
        line_of(item)
    if not os.access(file.parent, os.W_OK):
        raise TaskError(f"{file} can't be written: there is no folder {file.parent} that may be written to")


def _write(file: Path, config: Config, tasks: list[Task], found: list[Any]) -> None:
    """The tasks that are ok, with `validated`. Raises TaskError."""
    from dataclasses import replace

    from pipeline.task_lines import line_of
    from workers.validate import stamp

    good = [verdict for verdict in found if verdict.verdict == "ok"]
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as out:
            for verdict in good:
                out.write(f"{line_of(replace(tasks[verdict.number], validated=stamp(config, verdict)))}\n")
        fresh.replace(file)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise TaskError(f"{file} can't be written: {error.strerror}") from None
    click.echo(f"wrote {len(good)} of {len(tasks)} tasks to {file}", err=True)
