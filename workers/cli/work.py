"""`rollout work`: one worker process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import click

from pipeline.config import Config
from pipeline.envelope import WORKING, Stage
from pipeline.errors import ConfigError
from workers.cli import maint
from workers.cli.base import INTERRUPTED, Command, located, settings

if TYPE_CHECKING:
    from workers.loop import Worker

log = logging.getLogger(__name__)


@click.command(cls=Command)
@click.argument("stage", type=click.Choice([*(stage.value for stage in WORKING), "maint"]))
@click.option("--slots", type=click.IntRange(min=1), help="Rollouts at a time (default: workers.STAGE.slots).")
@click.option("--burst", is_flag=True, help="End when the stage is empty.")
@click.option(
    "--metrics", type=click.IntRange(0, 65535), metavar="PORT", help="Serve Prometheus metrics on 127.0.0.1:PORT."
)
@click.option(
    "--handler",
    "handlers",
    multiple=True,
    metavar="MODULE:CLASS",
    help="A handler of yours, loaded at start. May be repeated.",
)
@click.option("--tied", is_flag=True, hidden=True, help="End when standard input closes.")
@click.pass_context
def work(
    ctx: click.Context,
    stage: str,
    slots: int | None,
    burst: bool,
    metrics: int | None,
    handlers: tuple[str, ...],
    tied: bool,
) -> None:
    """Serve STAGE (init, run or eval) until told to stop; `maint` does the upkeep of this machine and of the line.

    SIGTERM or Ctrl-C: nothing more is claimed; what is in work ends, or is given back after limits.grace.
    """
    settings(ctx).logs("info")
    if stage == "maint":
        if slots or handlers or metrics is not None:
            raise click.UsageError("`work maint` takes none of --slots, --handler and --metrics")
        if tied:
            threading.Thread(target=_until_stdin_closes, daemon=True).start()
        ctx.exit(maint.keep_and_serve(settings(ctx).config(), burst))
    config = located(settings(ctx).config(), wait=True)
    if handlers:
        config = config.changed({"handlers.load": [*config.handlers.load, *handlers]})
    if metrics is not None:
        config = config.changed({"workers.metrics_port": metrics})
    own = settings(ctx).own_process
    ctx.exit(asyncio.run(_serve(config, Stage(stage), slots, burst, tied, own)))


async def _serve(config: Config, stage: Stage, slots: int | None, burst: bool, tied: bool, own: bool) -> int:
    """Run the worker; the exit code. `own`: this process is the worker's alone."""
    from workers.loop import Worker

    worker = Worker(config, stage, slots or getattr(config.workers, stage.value).slots, burst=burst)
    if config.workers.metrics_port:
        try:
            worker.metrics.serve(config.workers.metrics_port)
        except OSError as error:
            raise ConfigError(
                f"metrics port {config.workers.metrics_port} can't be used: {error.strerror}; choose another"
            ) from None
    worker.install_signals()
    interrupted = _on_interrupt(worker)
    if tied:
        threading.Thread(target=_until_stdin_closes, daemon=True).start()
    try:
        await worker.run()
    finally:
        if own:
            _end_leftovers()
    return INTERRUPTED if interrupted else 0


def _end_leftovers() -> None:
    """Kill what handlers have started and left below this process, which is the worker's alone: its parent would be the
    machine's first process, where Slurm without cgroups does not look for it."""
    from workers.sandbox import processes

    left = processes.descendants(os.getpid())
    for item in left:
        processes.kill(item)
    if left:
        log.warning("killed %d processes that handlers had started and not ended", len(left))


def _on_interrupt(worker: Worker) -> list[int]:
    """Ctrl-C stops as SIGTERM does, but is told apart; a second one ends the process at once."""
    seen: list[int] = []

    def interrupt() -> None:
        if seen:
            os._exit(INTERRUPTED)
        seen.append(signal.SIGINT)
        worker.ending.on_signal(signal.SIGINT)

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    return seen


def _until_stdin_closes() -> None:
    """Whoever started this worker is gone: stop as for SIGTERM."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
