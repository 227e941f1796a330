"""`rollout redis`: a private server that stays."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import click

from pipeline import server
from pipeline.address_file import file_of
from pipeline.config import Config
from pipeline.connection import check_sync, connect_sync
from pipeline.errors import LineError, RedisUnavailable
from workers.cli import published
from workers.cli.base import Group, json_option, say, settings

LOOK_EVERY = 0.5


@click.group(cls=Group)
def redis() -> None:
    """Start, stop or look at a private Redis that stays when the command has ended."""


def _folder(config: Config, data: Path | None) -> Path | None:
    if data is not None:
        return data.absolute()
    return config.path_of(config.redis.data) if config.redis.data else None


data_option = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where its data lies (default: redis.data, else the state folder).",
)


@redis.command()
@click.option("--foreground", is_flag=True, help="Stay, and end it on SIGTERM or Ctrl-C.")
@click.option(
    "--publish",
    is_flag=True,
    help="With --foreground: publish its address in the line's folder (slurm.folder, redis.address_file), so that it "
    "may move to another machine; waits while another one keeps it.",
)
@click.option(
    "--bind", metavar="ADDRESS", help="Listen on this address too (with a password); default: a Unix socket alone."
)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="With --bind; 0 takes a free one.")
@data_option
@json_option
@click.pass_context
def start(
    ctx: click.Context, foreground: bool, publish: bool, bind: str | None, port: int, data: Path | None, as_json: bool
) -> None:
    """Start a private server; its address and password lie in its folder (url, password).

    With --publish, --bind names an interface (ib0), a network (10.1.0.0/16) or an address (default: network.interface).
    """
    if publish and not foreground:
        raise click.UsageError("--publish belongs to --foreground: the server ends with this process")
    if port and bind is None and not publish:
        raise click.UsageError("--port belongs to --bind or --publish")
    settings(ctx).logs()
    config = settings(ctx).config()
    if publish:
        published.keep(config, data, bind or "", port, as_json)
        return
    stop = threading.Event()
    if foreground:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    started = server.start(
        _folder(config, data),
        keep=True,
        tied=foreground,
        tcp=(bind, port) if bind else None,
        fraction=config.redis.maxmemory_fraction,
    )
    _say_started(started.state, as_json)
    if not foreground:
        return
    while not stop.wait(LOOK_EVERY):
        if not started.alive():
            started.stop()
            raise RedisUnavailable(f"the server on {started.state.folder} ended by itself; its log there says why")
    started.stop()


def _say_started(state: Any, as_json: bool) -> None:
    if as_json:
        say({"url": state.url, "password_file": state.password_file, "folder": state.folder, "pid": state.pid})
        return
    click.echo(f"{state.url}  (pid {state.pid}, data and password in {state.folder})")
    click.echo(
        "rollout commands of this user find it by themselves, unless --data names a folder of its own: then, and on "
        "other machines, set ROLLOUT_REDIS__URL and ROLLOUT_REDIS__PASSWORD_FILE"
    )


@redis.command()
@data_option
@json_option
@click.pass_context
def stop(ctx: click.Context, data: Path | None, as_json: bool) -> None:
    """End the private server, or the published one where it runs on this machine; its data stays."""
    settings(ctx).logs()
    config = settings(ctx).config()
    if data is None and file_of(config) is not None:
        published.stop(config, as_json)
        return
    ended = server.stop(_folder(config, data))
    if ended is None:
        raise LineError("no private server runs" + (f" on {data}" if data else ""))
    if as_json:
        say({"stopped": ended.pid, "folder": ended.folder})
    else:
        click.echo(f"stopped (pid {ended.pid}); its data stays in {ended.folder}")


@redis.command()
@data_option
@json_option
@click.pass_context
def status(ctx: click.Context, data: Path | None, as_json: bool) -> None:
    """Say whether the private server, or the published one, runs, and how full it is. Exit 1 when it does not."""
    settings(ctx).logs()
    config = settings(ctx).config()
    if data is None and file_of(config) is not None:
        published.status(config, as_json)
        return
    state = server.status(_folder(config, data))
    if state is None:
        raise LineError("no private server runs: `rollout redis start` starts one")
    known = {"redis.url": state.url, "redis.password_file": state.password_file, "redis.address_file": ""}
    with connect_sync(config.changed(known)) as client:
        facts = check_sync(client, state.url)
    if as_json:
        say({
            "url": state.url, "pid": state.pid, "folder": state.folder, "kind": facts.kind, "version": facts.version,
            "aof": facts.aof, "used_memory": facts.used_memory, "maxmemory": facts.maxmemory,
        })  # fmt: skip
        return
    memory = published.memory_said(facts)
    click.echo(
        f"{facts.kind} {facts.version} at {state.url} (pid {state.pid}, data in {state.folder}), memory: {memory}"
    )
