"""`rollout redis start --publish`, and `status` and `stop` of the server that it keeps, on whatever machine it runs."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import click

from pipeline import server_files
from pipeline.address_file import Address, file_of, read
from pipeline.config import Config
from pipeline.connection import ServerFacts, check_sync, connect_sync
from pipeline.errors import ConfigError, LineError, RedisUnavailable
from pipeline.folder_lock import Holder, look
from pipeline.publisher import Plan, Publisher
from workers.address import own_address
from workers.cli.base import say

STOP_SECONDS = 40.0


def keep(config: Config, data: Path | None, bind: str, port: int, as_json: bool) -> None:
    """Until SIGTERM or Ctrl-C. Raises ConfigError, RedisUnavailable."""
    file = file_of(config)
    if file is None:
        raise ConfigError(
            "nothing says where to publish the address: set slurm.folder (or redis.address_file), and leave redis.url "
            "empty, since a URL that is set is not looked up again"
        )
    home = home_of(config, data)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{file.parent}: can't be made: {error.strerror}") from None
    if bind:
        config = config.changed({"network.interface": bind})
    plan = Plan(
        home=home, file=file, bind=(own_address(config), port), lease=config.slurm.lock,
        fraction=config.redis.maxmemory_fraction, job=os.environ.get("SLURM_JOB_ID", ""),
    )  # fmt: skip
    publisher = Publisher(plan, lambda address: _say_published(address, plan, as_json))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: publisher.stop())
    publisher.run()


def home_of(config: Config, data: Path | None = None) -> Path:
    """The folder of a published server's data and lock. Raises ConfigError where nothing names one."""
    if data is not None:
        return data.absolute()
    if config.slurm.folder:
        return config.path_of(config.slurm.folder).absolute() / "redis"
    if config.redis.data:
        return config.path_of(config.redis.data).absolute()
    raise ConfigError("no folder for the data of a Redis that may move: set slurm.folder, redis.data or --data")


def _say_published(address: Address, plan: Plan, as_json: bool) -> None:
    if as_json:
        say({"url": address.url, "epoch": address.epoch, "job": address.job, "address_file": str(plan.file)})
    else:
        click.echo(f"{address.url}  (epoch {address.epoch}, published in {plan.file}, data in {plan.home})")


def status(config: Config, as_json: bool) -> None:
    """Where the published server is, who keeps it, whether it answers. Raises RedisUnavailable where it does not."""
    file = file_of(config)
    assert file is not None
    address, holder = read(file), _holder(config)
    kept = f"kept by {holder}" if holder and not holder.released else "nobody keeps it"
    where = f"{address.url} (epoch {address.epoch}{f', job {address.job}' if address.job else ''}; {kept})"
    facts: ServerFacts | None = None
    trouble = ""
    with connect_sync(config) as client:
        try:
            facts = check_sync(client, address.url)
        except RedisUnavailable as error:
            trouble = str(error)
    if as_json:
        say({
            "url": address.url, "epoch": address.epoch, "job": address.job, "started": address.started,
            "address_file": str(file), "holder": _told(holder), "answers": facts is not None, "trouble": trouble,
            **({} if facts is None else {
                "kind": facts.kind, "version": facts.version, "aof": facts.aof, "used_memory": facts.used_memory,
                "maxmemory": facts.maxmemory,
            }),
        })  # fmt: skip
    if facts is None:
        raise RedisUnavailable(f"{trouble}; last published: {where}")
    if not as_json:
        up = time.time() - address.started
        click.echo(f"{facts.kind} {facts.version} at {where}, up {up:.0f} s, memory: {memory_said(facts)}")


def stop(config: Config, as_json: bool) -> None:
    """End the keeper, where it runs on this machine. Raises LineError where it runs elsewhere or nowhere."""
    holder = _holder(config)
    if holder is None or holder.released:
        raise LineError("no published Redis runs: nobody keeps the line's folder")
    about = holder.about
    if not _is_here(about):
        job = about.get("job")
        raise LineError(f"{holder} keeps it, on another machine: " + (
            f"`scancel --signal=TERM --batch {job}` ends it, or `rollout slurm down` with the whole line" if job
            else f"send SIGTERM to process {about.get('pid')} there"
        ))  # fmt: skip
    os.kill(int(about["pid"]), signal.SIGTERM)
    until = time.monotonic() + STOP_SECONDS
    while _is_here(about):
        if time.monotonic() > until:
            raise LineError(f"{holder} was told to end {STOP_SECONDS:g} s ago and has not ended yet")
        time.sleep(0.05)
    if as_json:
        say({"stopped": about["pid"], "folder": str(home_of(config))})
    else:
        click.echo(f"stopped (keeper {about['pid']}); its data stays in {home_of(config)}")


def _is_here(about: Any) -> bool:
    """Whether the keeper is a process of this machine, and runs."""
    return bool(
        about.get("host") == socket.gethostname()
        and about.get("boot") == server_files.boot_id()
        and server_files.process_start(int(about["pid"])) == about.get("start_time")
    )


def _holder(config: Config) -> Holder | None:
    try:
        return look(home_of(config) / "lock")
    except (OSError, ConfigError):
        return None


def _told(holder: Holder | None) -> dict[str, Any] | None:
    if holder is None:
        return None
    return {name: holder.about.get(name) for name in ("job", "host", "pid", "started")} | {"released": holder.released}


def memory_said(facts: ServerFacts) -> str:
    if not facts.maxmemory:
        return "no maxmemory"
    return f"{100 * facts.used_memory / facts.maxmemory:.1f} % of {facts.maxmemory / 2**30:.1f} GiB"
