"""`rollout gym`: the line as an agent server that NeMo RL, and every user of NeMo Gym, can call."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import click

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.datasets import mapping_of
from workers.cli.base import INTERRUPTED, Command, check_lane, json_option, located, say, settings


@click.command(cls=Command)
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Listen there.")
@click.option("--handler", metavar="NAME", help="For rows that are a task's bare data.")
@click.option("--dataset", metavar="NAME", help="A section of `datasets`: which columns of a row are what.")
@click.option("--lane", default="train", show_default=True, help="Nobody else may pop it.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="For one rollout (default: none).")
@click.option(
    "--dead-after",
    default=300.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="S",
    help="Requests end with 504 when for so long no live worker serves a stage that has work.",
)
@json_option
@click.pass_context
def gym(ctx: click.Context, /, dataset: str | None, as_json: bool, **named: Any) -> None:
    """Serve the line as NeMo Gym's agent servers are served: POST /run answers with one rollout.

    It has no password: keep it in a network of your own. SIGTERM or Ctrl-C: open requests are answered with 503, their
    rollouts are cancelled.
    """
    from workers.gym_server import Options

    settings(ctx).logs("info")
    config = located(settings(ctx).config(), wait=True)
    check_lane(config, named["lane"])
    options = Options(dataset=mapping_of(config, dataset) if dataset else None, **named)
    ctx.exit(INTERRUPTED if asyncio.run(_serve(config, options, as_json)) == signal.SIGINT else 0)


async def _serve(config: Config, options: Any, as_json: bool) -> int:
    """Until a signal; its number."""
    from workers.gym_server import GymServer

    told: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.put_nowait, number)
    async with RolloutClient(config=config) as client:
        server = GymServer(client, options)
        url = await server.start()
        if as_json:
            say({"url": url, "lane": options.lane})
        else:
            click.echo(f"POST {url}/run, lane {options.lane}")
        try:
            return await told.get()
        finally:
            await server.stop()
