"""`rollout enqueue`: tasks from a file into the line, and, if wanted, the wait for their end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import islice
from typing import Any

import click

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.datasets import Spool
from pipeline.queue import Queue
from workers import interrupt
from workers.cli.base import Command, complain, json_option, located, say, settings
from workers.cli.rows import put_aside, row_options

LOOK_EVERY = 0.25
PAGE = 500
"""Tasks, or rollouts, that one look or one write is about."""


@click.command(cls=Command)
@click.argument("file", metavar="FILE|-")
@row_options
@click.option("--samples", default=1, show_default=True, type=click.IntRange(min=1), help="Rollouts of each task.")
@click.option("--lane", default="train", show_default=True)
@click.option("--priority", default=0, show_default=True, help="Higher goes first.")
@click.option("--wait", is_flag=True, help="Wait until all have ended; exit 1 if any failed.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="With --wait: give up after S seconds.")
@click.option("--unchecked", is_flag=True, help="Do not load the handler here to check the tasks.")
@json_option
@click.pass_context
def enqueue(
    ctx: click.Context, /, file: str, samples: int, lane: str, priority: int, wait: bool, timeout: float | None,
    unchecked: bool, as_json: bool, **chosen: Any,
) -> None:  # fmt: skip
    """Enqueue the tasks of FILE (JSON lines or Parquet; - is stdin).

    A row is a task, {"handler": "math", "data": {...}, "id": "..."}; with --handler, its bare data; or a dataset's row,
    which --dataset or its columns (SWE-bench's, verl's) turn into one. The whole file is checked first: with one bad
    row nothing is enqueued. A task enqueued twice under one id is one group.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout belongs to --wait")
    settings(ctx).logs()
    config = settings(ctx).config()
    with Spool() as spool:
        put_aside(spool, file, config, check=not unchecked, **chosen)
        ctx.exit(interrupt.run(_enqueue(located(config), spool, samples, lane, priority, wait, timeout, as_json)))


async def _enqueue(
    config: Config,
    spool: Spool,
    samples: int,
    lane: str,
    priority: int,
    wait: bool,
    timeout: float | None,
    as_json: bool,
) -> int:
    async with RolloutClient(config=config) as client:
        ids: list[str] = []
        tasks = spool.tasks()
        while some := list(islice(tasks, PAGE)):
            ids += await client.enqueue(some, samples=samples, lane=lane, priority=priority)
        if not wait:
            if as_json:
                say({"tasks": len(spool), "rollouts": len(ids), "ids": ids})
            else:
                each = len(ids) // max(1, len(spool))  # with those that groups.extra adds
                click.echo(f"{len(spool)} tasks x {each} samples = {len(ids)} rollouts in lane {lane}")
            return 0
        ended = await wait_for(client.queue, ids, timeout)
    return _summary(ids, ended, timeout, as_json)


def _summary(ids: list[str], ended: dict[str, str], timeout: float | None, as_json: bool) -> int:
    counted = Counter(ended.values())
    waiting = len(ids) - len(ended)
    if as_json:
        outcomes = {name: counted[name] for name in ("scored", "failed", "cancelled", "acked")}
        say(
            {
                "rollouts": len(ids),
                **outcomes,
                "waiting": waiting,
                "failed_ids": [id for id in ids if ended.get(id) == "failed"],
            }
        )
    else:
        click.echo(", ".join([f"{len(ids)} rollouts", *(f"{count} {name}" for name, count in sorted(counted.items()))]))
        for id in [id for id in ids if ended.get(id) == "failed"][:10]:
            complain(f"{id} failed: `rollout show {id}` says why")
    if waiting:
        complain(
            f"{waiting} of {len(ids)} rollouts had not ended after {timeout:g} s: `rollout depth` shows where they are"
        )
    return 1 if waiting or counted["failed"] else 0


async def wait_for(queue: Queue, ids: list[str], timeout: float | None = None) -> dict[str, str]:
    """Wait until each has ended; id -> scored, failed, cancelled, or acked (somebody popped it and it did not fail).

    What has not ended within `timeout` seconds is left out.
    """
    from workers.view import Progress

    until = time.monotonic() + timeout if timeout is not None else None
    ended: dict[str, str] = {}
    with Progress(len(ids), "rollouts") as bar:
        while len(ended) < len(ids):
            left = [id for id in ids if id not in ended]
            for at in range(0, len(left), PAGE):
                ended |= await outcomes_of(queue, left[at : at + PAGE])
            bar.at(len(ended), dict(Counter(ended.values())))
            if until is not None and time.monotonic() > until:
                break
            if len(ended) < len(ids):
                await asyncio.sleep(LOOK_EVERY)
    return ended


async def outcomes_of(queue: Queue, ids: list[str]) -> dict[str, str]:
    """The outcomes of those that have ended."""

    async def one(id: str) -> Any:
        return await queue.execute("HMGET", queue.key("r", id), "outcome", "stage")

    rows = await asyncio.gather(*(one(id) for id in ids))
    ended = {id: row[0].decode() for id, row in zip(ids, rows, strict=True) if row[0]}
    gone = [id for id, row in zip(ids, rows, strict=True) if not row[1]]
    letters = await asyncio.gather(*(queue.execute("EXISTS", queue.key("letter", id)) for id in gone))
    return ended | {id: "failed" if letter else "acked" for id, letter in zip(gone, letters, strict=True)}
