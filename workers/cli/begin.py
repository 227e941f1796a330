"""The first hour: `rollout demo`, `try`, `init`, `doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.config import Config
from pipeline.datasets import Chosen, Reader
from pipeline.envelope import Task
from pipeline.errors import ConfigError, TaskError
from workers import jsonl
from workers.cli.base import Command, json_option, say, settings
from workers.interrupt import Interrupted

if TYPE_CHECKING:
    from workers.doctor import Finding

BESIDE = "tasks.jsonl"
"""A handler's own tasks, where its folder has such a file."""
SAY_TASKS = "say --tasks FILE (JSON lines)"


@click.command(cls=Command)
@click.option(
    "--handler", default="reason", show_default=True, metavar="NAME", help="A built-in name, or module:Class."
)
@click.option("--tasks", "file", metavar="FILE", help="Tasks, JSON lines or Parquet (default: the handler's own).")
@click.option("--count", default=32, show_default=True, type=click.IntRange(min=1), help="Tasks at most.")
@click.option("--samples", default=4, show_default=True, type=click.IntRange(min=1), help="Rollouts of each task.")
@click.option(
    "--policy",
    default="",
    metavar="URL",
    help="A real policy server (set policy.tokenizer too); default: a scripted one.",
)
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes a stage.")
@click.option("--keep", is_flag=True, help="Keep logs and data; the folder is printed.")
@json_option
@click.pass_context
def demo(
    ctx: click.Context, handler: str, file: str | None, count: int, samples: int, policy: str, workers: int, keep: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """See the line run: tasks through three worker processes and back, scored.

    Starts a private Redis (unless redis.url is set), a scripted policy (nobody's model) and one worker process a
    stage, and ends them all. Exit 1 when a rollout failed.
    """
    from workers import view_demo
    from workers.demo import Plan, run

    settings(ctx).logs()
    config = settings(ctx).config()
    url = policy or config.policy.url
    need_tokenizer(config, url)
    tasks = tasks_for(handler, file, config, count)
    signal.signal(signal.SIGTERM, _terminated)
    plan = Plan(config=config, handler=handler, tasks=tasks, samples=samples, workers=workers, policy=url, keep=keep)
    with run(plan) as outcome:
        totals = view_demo.summary(outcome)
        if as_json:
            say(totals)
        else:
            view_demo.show(outcome, scripted=not url)
    ctx.exit(1 if totals["scored"] < totals["rollouts"] else 0)


def _terminated(number: int, _: object) -> None:
    """So that the demo's processes are ended, as for Ctrl-C."""
    raise Interrupted(number)


def need_tokenizer(config: Config, url: str) -> None:
    """A real policy needs its own tokenizer: told before anything is started."""
    if url and not config.policy.tokenizer:
        raise ConfigError(f"policy.tokenizer is empty: give the folder of the tokenizer.json that {url} serves with")


def tasks_for(handler: str, file: str | None, config: Config, count: int, mend: str = SAY_TASKS) -> list[Task]:
    """`count` checked tasks at most: of the file, else the handler's own. Raises TaskError, UnknownHandler.

    `mend`: what to do about a handler that has none.
    """
    from workers.demo import example_tasks
    from workers.workshop import handlers_path

    checker = jsonl.Checker(handlers_path(config))
    if file is None:
        tasks = example_tasks(handler, count)
        beside = Path(handlers_path(config)) / BESIDE
        if not tasks and beside.is_file():
            with beside.open("rb") as lines:
                found = jsonl.read(lines, handler=handler, checker=checker, name=str(beside))
            tasks = [task for task in found if task.handler == handler][:count]
        for task in tasks:
            checker.check(task)
        if not tasks:
            none = f"handler {handler!r} has no tasks of its own here: {mend}"
            try:
                checker.check(Task(handler=handler))  # an unknown handler is told first
            except TaskError as error:
                raise TaskError(f"{none}; of no data it says: {error}") from None
            raise TaskError(none)
        return tasks
    return list(jsonl.stream(file, Reader(handler=handler, check=checker.check), Chosen(limit=count)))


@click.command("try", cls=Command)
@click.argument("handler")
@click.option("--task", "--data", "text", metavar="JSON", help="The task's data, as one JSON map.")
@click.option("--tasks", "file", metavar="FILE", help="JSON lines; the first one is tried.")
@click.option(
    "--policy",
    default="",
    metavar="URL",
    help="A real policy server (set policy.tokenizer too); default: a scripted one.",
)
@click.option(
    "--says", default="", metavar="TEXT", help="Have the scripted policy say this, instead of the right answer."
)
@click.option("--traceback", "whole", is_flag=True, help="On a failure: the whole traceback, not only your own code.")
@click.option("--pdb", is_flag=True, help="On a failure: a debugger where your code raised.")
@json_option
@click.pass_context
def attempt(
    ctx: click.Context,
    handler: str,
    text: str | None,
    file: str | None,
    policy: str,
    says: str,
    whole: bool,
    pdb: bool,
    as_json: bool,
) -> None:
    """Try HANDLER: one rollout in this process, without Redis, every turn shown as it comes."""
    from workers import trial, view_trial
    from workers.demo import answers_of

    if text is not None and file is not None:
        raise click.UsageError("--task or --tasks, not both")
    settings(ctx).logs()
    config = settings(ctx).config()
    if policy:
        config = config.changed({"policy.url": policy})
    need_tokenizer(config, config.policy.url)
    task = _one_task(handler, text, file, config)
    with ExitStack() as stack:
        answers = {} if config.policy.url or says else answers_of([task], config)
        ready, options = trial.policy_for(config, answers, stack, says)
        done = asyncio.run(trial.play(ready, task, options, loud=not as_json))
    if as_json:
        say(view_trial.record(done, task))
    else:
        view_trial.show(done, task, whole=whole, scripted="" if options is None else "right" if answers else "other")
    if pdb and done.error is not None:
        from pdb import post_mortem

        post_mortem(trial.users_place(done.error))
    ctx.exit(1 if done.failed else 0)


def _one_task(handler: str, text: str | None, file: str | None, config: Config) -> Task:
    from workers.workshop import handlers_path

    if text is None:
        return tasks_for(handler, file, config, 1, "say --data JSON, or --tasks FILE (JSON lines)")[0]
    try:
        task = jsonl.parse(text, handler)
    except TaskError as error:
        raise click.UsageError(f"--data: {error}") from None
    try:
        jsonl.Checker(handlers_path(config)).check(task)
    except TaskError as error:
        raise TaskError(f"--data: {error}") from None
    return task


@click.command(cls=Command)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
@json_option
@click.pass_context
def init(ctx: click.Context, folder: Path, force: bool, as_json: bool) -> None:
    """Make DIR with a commented config.yaml, a small handler of your own and its tasks."""
    from workers import starter

    settings(ctx).logs()
    written = starter.write(folder, force=force)
    if as_json:
        say({"written": [str(path) for path in written], "handler": starter.HANDLER})
        return
    for path in written:
        click.echo(f"wrote {path}")
    click.echo(
        f"next: cd {folder}; change a line of sums.py; rollout try {starter.HANDLER}; "
        f"rollout demo --handler {starter.HANDLER}"
    )


@click.command(cls=Command)
@click.option(
    "--cluster", is_flag=True, help="The ways between the nodes of a Slurm job, from inside it: who reaches whom."
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, cluster: bool, as_json: bool) -> None:
    """Look at all that the line needs here, and say how to mend what is missing. Exit 1 when something fails.

    With --cluster, from inside a job on several nodes: srun -N4 --ntasks-per-node=1 rollout doctor --cluster
    """
    from workers.doctor import examine

    settings(ctx).logs("error")
    if cluster:
        found = _cluster(ctx, as_json)
    else:
        found = asyncio.run(examine(settings(ctx).config()))
        if as_json:
            click.echo(json.dumps([asdict(item) for item in found]))
        else:
            _show_findings(found)
    ctx.exit(1 if any(item.grade == "fail" for item in found) else 0)


def _cluster(ctx: click.Context, as_json: bool) -> list[Finding]:
    """What the node that reports has to say; nothing on the others. Ends the command where srun does it all."""
    from workers import view
    from workers.doctor import cluster, matrix

    here = cluster.step(os.environ, cluster.hostnames)
    if here is None:
        ctx.exit(cluster.by_srun(os.environ, sys.argv[1:]))
    seen = asyncio.run(cluster.examine(settings(ctx).config(), here))
    if seen is None:
        return []
    found = matrix.findings(seen)
    if as_json:
        nodes = {seen.name(rank): {**about, "nonce": ""} for rank, about in seen.hellos.items()}
        say({"nodes": nodes, "reach": matrix.reach(seen), "findings": [asdict(item) for item in found]})
        return found
    if len(seen.names) <= matrix.WIDEST:
        view.show_table(*matrix.table(seen))
        click.echo()
    _show_findings(found)
    return found


def _show_findings(found: list[Finding]) -> None:
    from workers import view

    rows = [[item.grade, item.name, item.text + (f"\n-> {item.mend}" if item.mend else "")] for item in found]
    view.show_table(("", "what", "found"), rows)
