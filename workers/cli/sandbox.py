"""`rollout sandbox`: what lives on this machine, taking one away, and removing what dead hosts left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from pipeline.config import Config
from workers import interrupt
from workers.cli.base import Command, Group, complain, json_option, line, say, settings, table


@click.group(cls=Group)
def sandbox() -> None:
    """Sandboxes of this user on this machine: list, stop, sweep."""


def _lines(config: Config) -> list[Path]:
    """Folders of all lines' hosts under the root that the configuration names."""
    from workers.sandbox.host import sandbox_root

    parent = sandbox_root(config).parent
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


@sandbox.command(cls=Command)
@json_option
@click.pass_context
def ls(ctx: click.Context, as_json: bool) -> None:
    """Live sandboxes on this machine, and what dead hosts left (their host is shown as dead)."""
    from workers.sandbox.boxes import orphans

    settings(ctx).logs()
    found = [
        _about(parent.name, root, box, alive)
        for parent in _lines(settings(ctx).config())
        for root, alive in orphans.hosts(parent)
        for box in orphans.boxes(root)
    ]
    if as_json:
        say(found)
        return
    rows = [
        (item["line"], item["name"], "alive" if item["alive"] else "dead", f"{item['seconds']:.0f} s", item["folder"])
        for item in found
    ]
    table(("line", "sandbox", "host", "age", "folder"), rows, none="no sandboxes")


def _about(name: str, root: Path, box: Path, alive: bool) -> dict[str, Any]:
    try:
        called = (box / "name").read_text("utf-8", "replace")
        born = (box / "name").stat().st_mtime
    except OSError:  # half made, or on its way out
        called, born = f"({box.name})", box.lstat().st_mtime
    age = max(0.0, time.time() - born)
    return {
        "line": name, "name": called, "host": root.name, "alive": alive, "seconds": round(age, 1), "folder": str(box)
    }  # fmt: skip


@sandbox.command(cls=Command)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@json_option
@click.pass_context
def stop(ctx: click.Context, ids: tuple[str, ...], as_json: bool) -> None:
    """Take the sandboxes of these rollouts away, wherever they are. The rollouts go back to INIT, as a loss."""
    settings(ctx).logs()
    config = settings(ctx).config()

    async def work() -> list[bool]:
        async with line(config) as queue:
            return await queue.leave_sandbox(ids)

    stopped = dict(zip(ids, interrupt.run(work()), strict=True))
    if as_json:
        say(stopped)
    else:
        for id in (id for id, done in stopped.items() if done):
            click.echo(f"{id}: its host was told")
    without = [id for id, done in stopped.items() if not done]
    if without:
        complain(f"no sandbox is named by {', '.join(without)}")
    ctx.exit(1 if without else 0)


@sandbox.command(cls=Command)
@json_option
@click.pass_context
def sweep(ctx: click.Context, as_json: bool) -> None:
    """Remove what dead hosts left on this machine: processes, mounts, folders. Living hosts' are not touched."""
    from workers.sandbox.boxes import orphans

    settings(ctx).logs()
    removed = [f"{parent.name}/{name}" for parent in _lines(settings(ctx).config()) for name in orphans.sweep(parent)]
    if as_json:
        say(removed)
        return
    for name in removed or ["nothing: no dead host left anything"]:
        click.echo(f"removed {name}")
