"""`rollout policy`: the servers of the model that is trained, their pause, and a scripted one for workers by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from pipeline.backends import ENDPOINTS, KINDS, SEEN_SECONDS, Backend, Backends, Load, backend_id
from pipeline.config import TRAINED, Config
from pipeline.engine import Engine
from pipeline.engine_calls import EngineError
from pipeline.errors import PolicyError
from pipeline.loopback import unreachable
from pipeline.queue import Queue
from pipeline.registration import looked_at
from pipeline.weights import Mode, Update, Weights
from workers import interrupt, view_policy
from workers.cli.base import Command, Group, complain, json_option, line, located, say, settings, table
from workers.cli.begin import tasks_for

log = logging.getLogger(__name__)

T = TypeVar("T")
MODES = get_args(Mode)

LOOK_SECONDS = 0.25


@click.group(cls=Group)
def policy() -> None:
    """Policy servers of the line: add, rm, ls, drain; pause and resume them all; a scripted one."""


def _with(ctx: click.Context, work: Callable[[Queue, Backends], Awaitable[T]], policy: str = TRAINED) -> T:
    settings(ctx).logs()

    async def main(config: Config) -> T:
        config.policy_of(policy)  # a name that is none is said
        async with line(config) as queue:
            return await work(queue, Backends(queue, policy))

    return interrupt.run(main(settings(ctx).config()))


whose = click.option(
    "--policy", default=TRAINED, show_default=True, metavar="NAME", help="Whose server it is (see `policies`)."
)


async def _known(backends: Backends, id: str) -> Backend:
    """The backend of this id, or at this URL. Raises PolicyError, which lists those that there are."""
    listed = (await backends.view()).backends
    for backend in listed:
        if id in (backend.id, backend.url):
            return backend
    names = ", ".join(backend.id for backend in listed) or "none"
    raise PolicyError(f"no policy server is registered as {id} (there are: {names})")


async def _until_idle(backends: Backends, id: str) -> None:
    """Wait until no worker has a call in flight there."""
    await asyncio.sleep(SEEN_SECONDS)
    while True:
        if not (await backends.view()).loads.get(id, Load()).calls:
            return
        await asyncio.sleep(LOOK_SECONDS)


@policy.command(cls=Command)
@click.argument("url")
@click.option("--id", default="", help="Its name in the line (default: host and port).")
@click.option("--kind", default=KINDS[0], show_default=True, type=click.Choice(KINDS), help="See docs/policy.md.")
@click.option("--model", default="", help="The name under which it serves (default: what it says).")
@click.option("--tokenizer", default="", metavar="FOLDER", help="Of its model (default: the model's, if on this disk).")
@click.option("--version", type=click.IntRange(min=0), help="Which weights it has (default: what it says).")
@click.option("--force", is_flag=True, help="Though it does not answer now.")
@whose
@json_option
@click.pass_context
def add(ctx: click.Context, /, url: str, force: bool, policy: str, as_json: bool, **about: Any) -> None:
    """Register the server at URL, until `rm`. It is asked first: for its model, its weights, and for one token."""
    config = settings(ctx).config()
    if about["tokenizer"]:
        about["tokenizer"] = str(config.path_of(about["tokenizer"]).resolve())

    async def work(queue: Queue, backends: Backends) -> Backend:
        async with Engine(url, timeout=config.policy.probe_timeout) as engine:
            try:
                backend = await looked_at(engine, **about)
            except EngineError as error:
                if not force:
                    raise PolicyError(f"{error}. It was not added; --force adds it all the same") from None
                complain(f"{error}; it is added all the same")
                unasked = {"id": about["id"] or backend_id(url), "url": engine.url}
                backend = Backend(**{**about, **unasked, "endpoint": ENDPOINTS.get(about["kind"], "")})
        if why := unreachable(backend.url, queue.config.redis.url):
            log.warning("%s", why)
        await backends.add(backend)
        return backend

    backend = _with(ctx, work, policy)
    if as_json:
        say(view_policy.registered(backend))
    else:
        click.echo(view_policy.registered_said(backend))


@policy.command(cls=Command)
@click.argument("id")
@whose
@json_option
@click.pass_context
def rm(ctx: click.Context, id: str, policy: str, as_json: bool) -> None:
    """Strike server ID off: it gets no new calls. Those in flight go on (`drain --wait` first lets them end)."""

    async def work(_: Queue, backends: Backends) -> str:
        backend = await _known(backends, id)
        if backend.owner:
            raise PolicyError(
                f"{backend.id} is kept registered by {backend.owner}: end that process, or `rollout policy drain` it"
            )
        await backends.remove(backend.id)
        return backend.id

    removed = _with(ctx, work, policy)
    if as_json:
        say({"removed": removed})
    else:
        click.echo(f"removed {removed}")


@policy.command(cls=Command)
@json_option
@click.pass_context
def ls(ctx: click.Context, as_json: bool) -> None:
    """The policy's version, and each server: its state and why, its work in flight, how fast it is, its lease.

    Then the servers of other policies (a judge's).
    """
    found = _with(ctx, lambda queue, _: view_policy.look(queue))
    if as_json:
        say(found)
        return
    click.echo(view_policy.headline(found))
    rows = [view_policy.row(backend) for backend in found["backends"]]
    table(view_policy.COLUMNS, rows, none="no policy server is registered: `rollout policy add URL`, `rollout serve`")
    for name, backends in found["others"].items():
        click.echo(f"policy {name}")
        table(view_policy.COLUMNS, [view_policy.row(backend) for backend in backends])


@policy.command(cls=Command)
@click.argument("id")
@click.option("--off", is_flag=True, help="Take it into use again.")
@click.option("--wait", is_flag=True, help="Until no call is in flight there.")
@whose
@json_option
@click.pass_context
def drain(ctx: click.Context, id: str, off: bool, wait: bool, policy: str, as_json: bool) -> None:
    """Send server ID no new calls; those in flight end. It stays registered, and its weights are updated."""
    if off and wait:
        raise click.UsageError("--wait belongs to draining, not to --off")

    async def work(_: Queue, backends: Backends) -> str:
        backend = await _known(backends, id)
        await backends.note(backend.id, drained=not off)
        if wait:
            await _until_idle(backends, backend.id)
        return backend.id

    drained = _with(ctx, work, policy)
    if as_json:
        say({"id": drained, "drained": not off})
    else:
        said = "gets calls again" if off else "has no call in flight" if wait else "gets no new calls"
        click.echo(f"{drained} {said}")


@policy.command(cls=Command)
@click.option("--mode", default="keep", show_default=True, type=click.Choice(MODES), help="What running calls do.")
@json_option
@click.pass_context
def pause(ctx: click.Context, mode: Mode, as_json: bool) -> None:
    """Stop all servers until `resume`: no call goes out, no token is sampled, and the clocks of rollouts stand still.

    keep: running calls freeze, and go on later. wait: they end first. abort: they end with the tokens that they have.
    """

    async def work(_: Queue, backends: Backends) -> list[str]:
        weights = Weights(backends, f"rollout policy pause on {socket.gethostname()}")
        paused = await weights.pause(mode, moving=False)
        await weights.part()
        return [backend.id for backend in paused]

    paused = _with(ctx, work)
    if as_json:
        say({"paused": paused})
    else:
        click.echo(f"paused: {', '.join(paused) or 'no server answers'}; `rollout policy resume` ends it")


@policy.command(cls=Command)
@click.option("--version", type=click.IntRange(min=0), help="The weights that you gave the servers meanwhile.")
@json_option
@click.pass_context
def resume(ctx: click.Context, version: int | None, as_json: bool) -> None:
    """End the pause, whoever's it is: with the same weights, or with those that were moved meanwhile (--version)."""

    async def work(_: Queue, backends: Backends) -> Update:
        weights = Weights(backends, f"rollout policy resume on {socket.gethostname()}")
        await weights.adopt()
        return await weights.resume(version)

    update = _with(ctx, work)
    if as_json:
        say(dataclasses.asdict(update))
        return
    if version is None:
        has = "none was named" if update.version is None else f"version {update.version}"
        click.echo(f"the policy goes on, with the weights that it had: {has}")
        return
    click.echo(f"version {update.version} is in force on {', '.join(update.updated)}")
    for id, why in update.ejected.items():
        complain(f"{id}: {why}")


@policy.command(cls=Command)
@click.argument("file", required=False)
@click.option("--handler", default="reason", show_default=True, metavar="NAME", help="For lines that name none.")
@click.option("--count", default=1000, show_default=True, type=click.IntRange(min=1), help="Tasks at most.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--p-correct", default=0.6, show_default=True, type=click.FloatRange(0, 1), help="Chance to be right.")
@click.option("--says", default="", metavar="TEXT", help="Say this to everything, and look no answer up.")
@click.option("--latency", default=0.0, show_default=True, type=click.FloatRange(0), help="Seconds before each reply.")
@click.option("--register", "registered", is_flag=True, help="In the line: RUN workers find it, with no setting.")
@click.option(
    "--host", default="", metavar="ADDRESS", help="With --register: listen there, not where Redis is reached."
)
@click.option("--advertise", default="", metavar="URL", help="With --register: how workers reach it.")
@whose
@json_option
@click.pass_context
def scripted(
    ctx: click.Context, /, file: str | None, handler: str, count: int, p_correct: float, says: str, latency: float,
    registered: bool, policy: str, as_json: bool, **where: Any,
) -> None:  # fmt: skip
    """Serve a scripted policy (nobody's model) that knows the answers to the tasks in FILE, until Ctrl-C.

    Prints the two settings that RUN workers need. FILE: JSON lines (default: the handler's own tasks). It listens on
    127.0.0.1; with --register on the address by which this machine reaches Redis.
    """
    from workers.demo import answers_of
    from workers.listening import place
    from workers.policy import scripted, scripted_line, tokenizer

    if not registered and (where["host"] or where["advertise"]):
        raise click.UsageError("--host and --advertise belong to --register")
    settings(ctx).logs()
    config = settings(ctx).config()
    if registered:
        config = located(config)
    else:
        where["host"] = "127.0.0.1"
    answers = {} if says else answers_of(tasks_for(handler, file, config, count), config)

    async def serve(folder: Path) -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        options = scripted.Options(
            tokenizer=tokenizer.make(folder), answers=answers, p_correct=p_correct, latency=latency, says=says,
            model=config.policy_of(policy).model,
        )  # fmt: skip
        at = place(config, "the scripted policy", **where)
        server = await scripted.start(options, at.port, at.listen)
        try:
            async with contextlib.AsyncExitStack() as held:
                if registered:
                    await held.enter_async_context(scripted_line.registered(config, at, folder, policy))
                section = "ROLLOUT_POLICY" if policy == TRAINED else f"ROLLOUT_POLICIES__{policy.upper()}"
                about = {f"{section}__URL": at.far, f"{section}__TOKENIZER": str(folder)}
                lines = [json.dumps(about)] if as_json else [f"export {name}={value}" for name, value in about.items()]
                click.echo("\n".join(lines))
                await stopped.wait()
        finally:
            await server.stop()

    with scripted_line.tokenizer_folder(config, registered) as folder:
        asyncio.run(serve(folder))
