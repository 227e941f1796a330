"""What every command shares: options, settings, exit codes, the way to Redis, and how a result is printed.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted. A command that failed never exits with 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
from redis.exceptions import RedisError

from pipeline import address_file, log, server
from pipeline.arrival import arrived_sync
from pipeline.config import Config, load
from pipeline.connection import check, connect, connect_sync, explain
from pipeline.errors import LineError, RedisUnavailable
from pipeline.queue import Queue
from workers.interrupt import Interrupted

INTERRUPTED = 130
SIGNALLED = 128
"""Added to the number of a signal that ended a command, as a shell does."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Settings:
    """What the options that every command takes say."""

    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    level: str = ""
    own_process: bool = False
    """Whether this process is the command's alone. Only its entry point says so: whoever calls a command from Python (a
    test, a trainer) has children of its own."""
    _config: Config | None = None

    def config(self) -> Config:
        """The settings, read once. Raises ConfigError."""
        if self._config is None:
            self._config = load(self.file, self.overrides)
        return self._config

    def logs(self, usual: str = "warning") -> None:
        """Send the log to stderr, at --log-level or the command's usual level."""
        log.set_up(self.level or usual)


def _file(ctx: click.Context, _: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.ensure_object(Settings).file = value


def _set(ctx: click.Context, _: click.Parameter, value: Sequence[str]) -> None:
    ctx.ensure_object(Settings).overrides.extend(value)


def _level(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Settings).level = value


def setting_options(hidden: bool) -> list[click.Option]:
    """--config, --set, --log-level: before the command or after it, whatever comes first to mind."""
    levels = click.Choice(["debug", "info", "warning", "error"])
    path = click.Path(path_type=Path)
    about: dict[str, Any] = {"expose_value": False, "hidden": hidden}
    return [
        click.Option(
            ["--config"], type=path, metavar="FILE", callback=_file, help="Settings (default: ./config.yaml).", **about
        ),
        click.Option(
            ["--set"],
            multiple=True,
            metavar="A.B=C",
            callback=_set,
            help="Change one setting. May be repeated.",
            **about,
        ),
        click.Option(["--log-level"], type=levels, callback=_level, help="How much the log on stderr says.", **about),
    ]


class Command(click.Command):
    """A command that takes the settings' options too."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.params.extend(setting_options(hidden=True))


class Group(click.Group):
    """Commands in the order in which they were added; errors become a sentence and an exit code, in one place."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def main(self, *args: Any, **named: Any) -> Any:
        standalone = named.pop("standalone_mode", True)
        code = self._code(*args, **named)
        if standalone:
            sys.exit(code)
        return code

    def _code(self, *args: Any, **named: Any) -> int:
        try:
            code = super().main(*args, **{**named, "standalone_mode": False})
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except Interrupted as error:
            return SIGNALLED + error.number
        except (click.Abort, KeyboardInterrupt):
            complain("interrupted")
            return INTERRUPTED
        except LineError as error:
            complain(str(error))
        except RedisError as error:
            complain(explain(error, ""))
        except BrokenPipeError:  # the reader has gone (`| head`): nothing is left to say
            quiet()
        return 1


Group.group_class = Group


def quiet() -> None:
    """Let nothing more be written to a pipe that nobody reads, not even by the interpreter's end."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it is open until the process ends


def complain(sentence: str) -> None:
    """To stderr, where it does not mix with the result."""
    click.echo(f"Error: {sentence}", err=True)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="For machines.")(function)


def settings(ctx: click.Context) -> Settings:
    return ctx.ensure_object(Settings)


def located(config: Config, *, wait: bool = False) -> Config:
    """The configuration with a Redis in it: the URL that is set, else the address published by one that may move, else
    the private server that runs.

    `wait`: for processes that stay; one that may move and is not there yet is waited for, limits.outage at most.
    Raises RedisUnavailable: a command that looks at the line never starts a Redis of its own.
    """
    path = address_file.file_of(config)
    if path is not None and wait:
        with connect_sync(config) as client:
            arrived_sync(client, config)
    elif path is not None:
        address_file.read(path)
    config = server.located(config)
    if not config.redis.url and os.environ.get("SLURM_JOB_ID"):
        raise RedisUnavailable(
            f"no Redis: this job knows of none, redis.url and slurm.folder are empty (settings: "
            f"{config.source or 'no file'}). Set LINE_CONFIG to the config.yaml, or submit from its folder, or set "
            "LINE_FOLDER to the line's folder"
        )
    if not config.redis.url:
        raise RedisUnavailable(
            "no Redis: redis.url is empty and no private server runs. Start one with `rollout redis start`, or set "
            "redis.url (in config.yaml, by --set redis.url=... or by ROLLOUT_REDIS__URL)"
        )
    return config


@asynccontextmanager
async def line(config: Config) -> AsyncIterator[Queue]:
    """The queue of the line that the configuration names. Raises RedisUnavailable, ConfigError."""
    config = located(config)
    client = connect(config)
    try:
        await check(client, config.redis.url)
        queue = Queue(client, config)
        await queue.look_at_schema()  # what is written carries the line's number; TooOld where that is too high
        yield queue
    finally:
        await client.aclose()


def check_lane(config: Config, lane: str) -> None:
    """Wrong use, unless the lane is one of the line's."""
    if lane not in config.line.lanes:
        raise click.UsageError(
            f"lane {lane!r} is unknown (known: {', '.join(config.line.lanes)}); line.lanes names them"
        )


def say(data: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(data, ensure_ascii=False, default=str))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, none: str = "nothing") -> None:
    """A table for people; `none` where it has no rows. Never cut: what does not fit the window is for the pager."""
    from workers.view import show_table

    show_table(columns, [[("" if cell is None else str(cell)) for cell in row] for row in rows], none)
