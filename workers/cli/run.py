"""`rollout run pause`, `resume` and `end`: whether new rollouts of a lane may begin."""

from __future__ import annotations

import click

from pipeline import inspect
from pipeline.backends import Backends
from pipeline.config import Config
from workers import interrupt
from workers.cli.base import Command, Group, check_lane, json_option, line, say, settings

lane_option = click.option("--lane", default="train", show_default=True, metavar="L", help="Of this lane.")


@click.group(cls=Group)
def run() -> None:
    """Pause, resume and end a run: a whole lane of the line."""


@run.command(cls=Command)
@lane_option
@click.option("--why", default="asked for from the command line", show_default=True, metavar="TEXT", help="Shown.")
@json_option
@click.pass_context
def pause(ctx: click.Context, lane: str, why: str, as_json: bool) -> None:
    """Begin no new rollouts at INIT until `resume`. To hold the policy too, at once: `rollout policy pause`."""
    _change(ctx, lane, why, as_json)


@run.command(cls=Command)
@lane_option
@json_option
@click.pass_context
def resume(ctx: click.Context, lane: str, as_json: bool) -> None:
    """Let rollouts begin again."""
    _change(ctx, lane, None, as_json)


@run.command(cls=Command)
@json_option
@click.pass_context
def end(ctx: click.Context, as_json: bool) -> None:
    """End the run that a trainer started and left: it bounds new rollouts no longer."""
    settings(ctx).logs()
    ended = interrupt.run(_ended(settings(ctx).config()))
    if as_json:
        say({"ended": ended})
    else:
        click.echo("the run is over: it bounds nothing any more" if ended else "there is no run")


async def _ended(config: Config) -> bool:
    async with line(config) as queue:
        return await Backends(queue).end_run()


def _change(ctx: click.Context, lane: str, why: str | None, as_json: bool) -> None:
    settings(ctx).logs()
    config = settings(ctx).config()
    check_lane(config, lane)
    paused = interrupt.run(_changed(config, lane, why))
    if as_json:
        say({"lane": lane, "paused": paused})
    else:
        click.echo(paused or f"the run of lane {lane} goes on")


async def _changed(config: Config, lane: str, why: str | None) -> str:
    """The sentence of the pause that there is now; empty when there is none."""
    async with line(config) as queue:
        if why is None:
            await queue.resume_lane(lane)
        else:
            await queue.pause_lane(lane, why)
        return (await inspect.pauses(queue)).get(lane, "")
