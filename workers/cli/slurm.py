"""`rollout slurm`: the line's jobs on a Slurm cluster, from a login node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.config_slurm import KINDS
from pipeline.connection import explain
from pipeline.errors import ConfigError, RedisUnavailable
from workers import interrupt
from workers.cli.base import INTERRUPTED, Group, json_option, line, say, settings, table

if TYPE_CHECKING:
    from workers.slurm.jobs import Jobs
    from workers.slurm.state import State
    from workers.slurm.status import Live

KIND = click.Choice(list(KINDS))
RESIZED = click.Choice([kind for kind in KINDS if kind != "redis"])


@click.group(cls=Group)
def slurm() -> None:
    """The line on a Slurm cluster: an array of jobs for each stage, replaced before they end."""


def jobs_of(config: Config) -> Jobs:
    """The line's jobs. Raises ConfigError (no slurm.folder), SlurmError (no Slurm here)."""
    from workers.slurm import calls
    from workers.slurm.jobs import Jobs
    from workers.slurm.keeper import folder_of

    folder = folder_of(config)
    calls.require()
    return Jobs(folder, config.slurm.lock)


def look_of(config: Config, *, troubled: bool = False) -> Callable[[], Live]:
    """A look at the line itself, `troubled`: and at why it stands still. Where there is no Redis (yet), it says so."""
    from workers.slurm import status

    async def look() -> Live:
        try:
            async with line(config) as queue:
                return await status.live(queue, troubled=troubled)
        except RedisUnavailable as error:
            return status.Live(trouble=str(error))
        except RedisError as error:
            return status.Live(trouble=explain(error, ""))

    def quiet() -> Live:
        return interrupt.run(look())

    return quiet


@slurm.command()
@click.option("--print", "printed", is_flag=True, help="Show the scripts, and submit nothing.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(min=0), help="Seconds to wait.")
@json_option
@click.pass_context
def up(ctx: click.Context, printed: bool, timeout: float, as_json: bool) -> None:
    """Submit what is missing of the jobs in the settings, and wait until each stage has a live worker.

    A second `up` submits only what is missing, and takes changed settings for what is submitted from now on. Exit 1,
    with the reason, when a stage has no worker after --timeout; what was submitted stays.
    """
    from workers.slurm import calls, state as states, status, wanted
    from workers.slurm.bring_up import Wait
    from workers.slurm.rows import Row

    settings(ctx).logs()
    config, overrides = settings(ctx).config(), settings(ctx).overrides
    wanted.check(config)
    if printed:
        _print(config, overrides, as_json)
        return
    jobs = jobs_of(config)
    warning = wanted.make_folder(jobs.folder)
    if warning:
        click.echo(f"Warning: {warning}", err=True)
    before, there = states.read(jobs.folder), list[Row]()

    def made(known: State | None) -> State:
        """Nothing that ended before speaks against what is wanted now."""
        state = wanted.state_of(config, known, os.environ, overrides)
        there[:] = calls.rows_if_known(state.tag)
        over = {row.id for row in there if row.over}
        return replace(state, seen=sorted({*state.seen, *over}), before=sorted(over))

    state = jobs.change(made)
    for sentence in wanted.resized(before, state):
        _told(sentence)
    wait = Wait(
        jobs=jobs,
        changes=state.changes,
        timeout=timeout,
        look=look_of(config),
        say=_told,
        old=frozenset(state.seen),
        known=frozenset(row.job for row in there),
    )
    step, found = wait.until_up()
    _show(status.report(step.state, step.rows, found, jobs.logs), as_json)


def _print(config: Config, overrides: list[str], as_json: bool) -> None:
    from workers.slurm import state as states, wanted
    from workers.slurm.keeper import folder_of

    folder = folder_of(config)
    tag = states.tag_for(folder, states.read(folder))
    made = wanted.scripts(config, wanted.place_of(config, tag, os.environ, overrides))
    shown = {kind: text for kind, text in made.items() if config.slurm.jobs(kind).jobs}
    if as_json:
        say(shown)
        return
    click.echo("\n".join(shown.values()), nl=False)


def _told(sentence: str) -> None:
    """Progress goes to stderr, where it does not mix with the result."""
    click.echo(sentence, err=True)


def _show(told: dict[str, Any], as_json: bool) -> None:
    from workers.slurm import status

    if as_json:
        say(told)
        return
    table(status.COLUMNS, status.table(told), none="no jobs are wanted, and there are none")
    for sentence in status.sentences(told):
        click.echo(sentence)


@slurm.command(name="status")
@json_option
@click.pass_context
def status_(ctx: click.Context, as_json: bool) -> None:
    """Each kind of job: wanted, running, waiting and why, near their end; its live workers; what failed lately.

    Exit 1 when a kind lacks tasks that are neither there nor on their way.
    """
    from workers.slurm import status, wanted

    settings(ctx).logs()
    config = settings(ctx).config()
    jobs = jobs_of(config)
    state, rows = jobs.look()
    stale = wanted.changed_since(config, state)
    _show({**status.report(state, rows, look_of(config)(), jobs.logs), "settings": stale}, as_json)
    if stale and not as_json:
        click.echo(stale)
    ctx.exit(1 if status.missing(state, rows, time.time()) else 0)


@slurm.command()
@click.argument("kind", type=RESIZED)
@click.argument("number", type=click.IntRange(min=0))
@json_option
@click.pass_context
def scale(ctx: click.Context, kind: str, number: int, as_json: bool) -> None:
    """Let there be NUMBER tasks of KIND, and leave the others alone; `up` goes back to the settings' number.

    Too many: those that wait are cancelled, then those that would end soonest are told to end (nothing is lost).
    """
    from workers.slurm import calls, wanted

    settings(ctx).logs()
    config = settings(ctx).config()
    if kind == "vllm" and number and not config.slurm.vllm.model:
        raise ConfigError("slurm.vllm.model is empty: name the model that they serve, then `rollout slurm up`")
    jobs = jobs_of(config)
    before, stale = jobs.state().wanted(kind), wanted.changed_since(config, jobs.state())
    jobs.change(lambda _: jobs.state().sized({kind: number}))
    try:
        step = jobs.step()
    except calls.SlurmAway as error:
        noted = f"{kind}: {before} -> {number} is noted, and not done yet"
        raise calls.SlurmAway(f"{noted}: {error}. The maint task does it as soon as it can") from None
    if stale:
        _told(stale)
    if as_json:
        submitted = {name: {"tasks": count, "jobs": ids} for name, (count, ids) in step.submitted.items()}
        say({"kind": kind, "before": before, "wanted": number, "submitted": submitted, "refused": step.refused,
             "cancelled": step.plan.cancel, "told": step.plan.drain})  # fmt: skip
    else:
        click.echo(f"{kind}: {before} -> {number}")
        for sentence in step.said():
            click.echo(sentence)
    ctx.exit(1 if step.refused else 0)


@slurm.command()
@click.option("--finish", is_flag=True, help="First wait until the line is empty, as long as it takes.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(min=0), help="Seconds to wait.")
@json_option
@click.pass_context
def down(ctx: click.Context, finish: bool, timeout: float, as_json: bool) -> None:
    """Tell all jobs to end, Redis last, and wait until they have. Data, results and logs stay in slurm.folder."""
    from workers.slurm.bring_up import Wait, emptied
    from workers.slurm.finish import leave_word, until_empty

    settings(ctx).logs()
    config = settings(ctx).config()
    jobs = jobs_of(config)
    look = look_of(config)
    jobs.state()
    if finish:
        until_empty(jobs, look_of(config, troubled=True), _told)
    found = look()
    for half in (emptied(jobs.state()), {"redis": 0}):
        state = jobs.change(lambda _, half=half: jobs.state().sized(half))  # type: ignore[misc]
        Wait(jobs=jobs, changes=state.changes, timeout=timeout, look=look, say=_told).until_gone(set(half))
    leave_word(config)
    done = found.rollouts.get("done", 0)
    if as_json:
        say({"folder": str(jobs.folder), "rollouts": dict(found.rollouts)})
        return
    left = sum(count for stage, count in found.rollouts.items() if stage != "done")
    click.echo(f"all jobs have ended; data and logs stay in {jobs.folder}")
    if left or done:
        click.echo(f"{left} rollouts go on when the line is up again, {done} wait to be popped")


@slurm.command()
@click.argument("kind", type=KIND, required=False)
@click.option("--job", default="", metavar="ID", help="One job (12) or one task (12_3).")
@click.option("-n", "--lines", default=20, show_default=True, type=click.IntRange(min=0), help="Of each file's end.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@json_option
@click.pass_context
def logs(ctx: click.Context, kind: str | None, job: str, lines: int, follow: bool, as_json: bool) -> None:
    """The ends of the tasks' logs, of those that Slurm knows (without one: of the last). KIND: only of that kind."""
    from workers.slurm import calls, tails
    from workers.slurm.jobs import Jobs
    from workers.slurm.keeper import folder_of

    settings(ctx).logs("error")
    config = settings(ctx).config()
    jobs = Jobs(folder_of(config), config.slurm.lock)
    state = jobs.state()
    try:
        rows = calls.rows(state.tag)
    except calls.SlurmError:  # the files are there without it
        rows = []
    number, _, task = job.partition("_")
    if job and not (number.isdigit() and (task.isdigit() or not task)):
        raise click.UsageError(f"--job {job}: wanted a job's number (12) or a task's (12_3)")

    def there() -> list[Any]:
        found = tails.files(jobs.logs, state.tag, kind or "", number)
        return [path for path in found if not task or path.stem.endswith(f"-{job}")]

    shown = there() if job else tails.chosen(there(), rows, jobs.logs)
    if not shown and not follow:
        raise ConfigError(f"no log of {kind or 'the line'}{f' {job}' if job else ''} in {jobs.logs}")
    if as_json:
        say([{"file": str(path), "lines": tails.tail(path, lines)} for path in shown])
        return
    for path in shown:
        click.echo("\n".join([f"== {path.name}", *tails.tail(path, lines)]))
    for path, added in tails.follow(there) if follow else ():
        click.echo("".join(f"{path.stem}: {part}\n" for part in added.splitlines()), nl=False)


@slurm.command()
@click.pass_context
def keep(ctx: click.Context) -> None:
    """Replace what ends, until told to stop: on a login node, where compute nodes may not submit.

    A maint task does this by itself where it can; both may run.
    """
    from workers.slurm.keeper import Keeper

    settings(ctx).logs("info")
    config = settings(ctx).config()
    jobs_of(config).state()
    keeper = Keeper(config)
    seen: list[int] = []

    def stop(number: int, _: Any) -> None:
        seen.append(number)
        keeper.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    keeper.run()
    ctx.exit(INTERRUPTED if seen and seen[0] == signal.SIGINT else 0)
