"""`rollout serve`: vLLM, started, registered and looked after."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import click

from pipeline.backends import Backend, Backends
from pipeline.config import TRAINED
from workers import view_policy
from workers.cli.base import INTERRUPTED, Command, json_option, line, located, say, settings


@click.command(cls=Command)
@click.argument("model")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM ARGS...]")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--host", default="", metavar="ADDRESS", help="Listen there (default: the address that reaches Redis).")
@click.option("--advertise", default="", metavar="URL", help="How workers reach it (default: host and port).")
@click.option("--id", default="", help="Its name in the line (default: host and port).")
@click.option("--version", type=click.IntRange(min=0), help="Of the weights in MODEL (default: 0).")
@click.option(
    "--policy", default=TRAINED, show_default=True, metavar="NAME", help="Whose server it is: say judge for a judge."
)
@click.option("--vllm", "program", metavar="PATH", help="The vllm program (default: policy.vllm).")
@json_option
@click.pass_context
def serve(ctx: click.Context, /, arguments: tuple[str, ...], program: str | None, as_json: bool, **named: Any) -> None:
    """Start `vllm serve MODEL` with what the line needs, and keep it registered while it generates.

    SIGTERM or Ctrl-C: it takes no new calls, those in flight may end within limits.grace, then vLLM ends; a second one
    ends it at once. When vLLM ends or hangs, this ends with exit code 1 and the end of its log.
    """
    from workers.serving import Options, Serving

    settings(ctx).logs("info")
    config = located(settings(ctx).config(), wait=True)
    config.policy_of(named["policy"])  # a name that is none is said before anything is started
    options = Options(program=program or config.policy.vllm, arguments=arguments, **named)

    def said(backend: Backend) -> None:
        if as_json:
            say(view_policy.registered(backend))
        else:
            click.echo(view_policy.registered_said(backend))

    async def work() -> int:
        async with line(config) as queue:
            queue.patience = config.limits.grace
            return await Serving(config, Backends(queue, options.policy), options, said).run()

    ctx.exit(INTERRUPTED if asyncio.run(work()) == signal.SIGINT else 0)
