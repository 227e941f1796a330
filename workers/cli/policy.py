"""`rollout policy`: a scripted policy server for workers that are started by hand. Nobody's model."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from pathlib import Path

import click

from workers.cli.base import Command, json_option, settings
from workers.cli.begin import tasks_for


@click.command(cls=Command)
@click.argument("file", required=False)
@click.option("--handler", default="reason", show_default=True, metavar="NAME", help="For lines that name none.")
@click.option("--count", default=1000, show_default=True, type=click.IntRange(min=1), help="Tasks at most.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--p-correct", default=0.6, show_default=True, type=click.FloatRange(0, 1), help="Chance to be right.")
@click.option("--latency", default=0.0, show_default=True, type=click.FloatRange(0), help="Seconds before each reply.")
@json_option
@click.pass_context
def policy(
    ctx: click.Context, file: str | None, handler: str, count: int, port: int, p_correct: float, latency: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Serve a scripted policy (nobody's model) that knows the answers to the tasks in FILE, until Ctrl-C.

    Prints the two settings that RUN workers need. FILE: JSON lines (default: the handler's own tasks).
    """
    from workers.demo import answers_of
    from workers.policy import scripted, tokenizer

    settings(ctx).logs()
    config = settings(ctx).config()
    answers = answers_of(tasks_for(handler, file, config, count), config)

    async def serve(folder: Path) -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        options = scripted.Options(
            tokenizer=tokenizer.make(folder), answers=answers, p_correct=p_correct, latency=latency,
            model=config.policy.model,
        )  # fmt: skip
        server = await scripted.start(options, port)
        about = {"ROLLOUT_POLICY__URL": server.url, "ROLLOUT_POLICY__TOKENIZER": str(folder)}
        lines = [json.dumps(about)] if as_json else [f"export {name}={value}" for name, value in about.items()]
        click.echo("\n".join(lines))
        await stopped.wait()
        await server.stop()

    with tempfile.TemporaryDirectory(prefix="rollout-policy-") as folder:
        asyncio.run(serve(Path(folder)))
