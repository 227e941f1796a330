"""`rollout image`: the images that sandboxes start from, on this machine's disk."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline.errors import SandboxError
from workers import interrupt
from workers.cli.base import Command, Group, json_option, say, settings, table

MB = 10**6


@click.group(cls=Group)
def image() -> None:
    """Images of the apptainer driver: build, pull, list, fetch ahead, evict. Each machine has its own cache."""


def _parameters(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is no NAME=VALUE")
    return dict(value.split("=", 1) for value in values)


@image.command("build", cls=Command)
@click.argument("name")
@click.option("--from", "base", metavar="IMAGE", default="", help="A recipe, an image's name, a .sif or a folder.")
@click.option("--script", type=click.Path(dir_okay=False, path_type=Path), help="Extra steps (sh, run as root inside).")
@click.option("--param", "given", multiple=True, metavar="K=V", callback=_parameters, help="suite, mirror, packages.")
@click.option("--again", is_flag=True, help="Build anew what is there.")
@click.option("--sif", type=click.Path(dir_okay=False, path_type=Path), help="Also write it as a file, to share it.")
@json_option
@click.pass_context
def build_(
    ctx: click.Context, name: str, base: str, script: Path | None, given: dict[str, str], again: bool,
    sif: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Build the recipe NAME (host, debian, python), or NAME from another image and a script."""
    from workers.sandbox.images import build, manage, recipes
    from workers.sandbox.images.cache import Cache

    settings(ctx).logs("info")  # a line for each step: some take minutes
    config = settings(ctx).config()
    if not base and name not in recipes.names():
        raise click.UsageError(
            f"{name!r} is no recipe (recipes: {', '.join(recipes.names())}): say --from IMAGE --script FILE"
        )
    if not base and script:
        raise click.UsageError(f"a script makes an image of another name: `image build NEW --from {name} --script ...`")
    text = manage.read_script(script) if script else ""

    async def work() -> Any:
        made = await manage.build_named(config, name, base=base, script=text, given=given, again=again)
        if sif is not None:
            await build.to_sif(made, sif.absolute(), Cache.of(config))
        return made

    _told(interrupt.run(work()), name, as_json)


@image.command(cls=Command)
@click.argument("url")
@click.argument("name", default="")
@click.option("--again", is_flag=True, help="Pull anew what is there: a tag may mean another image by now.")
@json_option
@click.pass_context
def pull(ctx: click.Context, url: str, name: str, again: bool, as_json: bool) -> None:
    """Fetch an image from a registry (docker://, oras://, library://) or an archive (oci-archive:FILE)."""
    from workers.sandbox.images import manage
    from workers.sandbox.images.cache import Cache
    from workers.sandbox.images.resolve import pull as fetch, pullable

    settings(ctx).logs("info")
    if not pullable(url):
        raise click.UsageError(
            f"{url!r} is no registry's URL and no archive: docker://, oras://, oci-archive:FILE, ..."
        )
    if name:
        manage.check_name(name)
    cache = Cache.of(settings(ctx).config())
    _told(interrupt.run(fetch(cache, url, name=name, again=again)), name or url, as_json)


def _told(made: Any, name: str, as_json: bool) -> None:
    if as_json:
        say({"name": name, "digest": made.digest, "path": str(made.path), "binds": list(made.binds)})
    else:
        click.echo(f"{name} is ready: {made.path}")


@image.command(cls=Command)
@json_option
@click.pass_context
def ls(ctx: click.Context, as_json: bool) -> None:
    """List the images on this machine, the latest used first."""
    from workers.sandbox.images import manage
    from workers.view import seconds

    settings(ctx).logs()
    found = manage.listed(settings(ctx).config())
    if as_json:
        say([asdict(item) for item in found])
        return
    rows = [
        (
            ", ".join(item.names) or item.source, item.kind, f"{item.size / MB:.1f} MB", item.digest[:12],
            f"{seconds(time.time() - item.used)} ago",
            ", ".join(word for word, so in (("in use", item.in_use), ("pinned", item.pinned)) if so),
        )
        for item in found
    ]  # fmt: skip
    table(("name", "kind", "size", "digest", "last used", "state"), rows, none="no image is on this machine yet")


@image.command(cls=Command)
@click.argument("names", nargs=-1)
@json_option
@click.pass_context
def prefetch(ctx: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    """Make images ready before a rollout asks for them: NAMES, or those of images.prefetch."""
    from workers.sandbox.images import manage

    settings(ctx).logs("info")
    config = settings(ctx).config()
    if not names and not config.images.prefetch:
        raise click.UsageError("name images, or set images.prefetch")
    found = interrupt.run(manage.prefetch(config, names))
    if as_json:
        say(found)
    else:
        for name, why in found.items():
            click.echo(f"{name}: {why or 'ready'}")
    ctx.exit(1 if any(found.values()) else 0)


@image.command(cls=Command)
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that are not in use.")
@json_option
@click.pass_context
def evict(ctx: click.Context, names: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Remove images: NAMES, all, or (without either) the longest unused ones above images.keep_gb."""
    from workers.sandbox.images import manage

    settings(ctx).logs()
    if names and everything:
        raise click.UsageError("say NAMES or --all, not both")
    done = manage.evict(settings(ctx).config(), names, everything=everything)
    if as_json:
        say(asdict(done))
    else:
        for name in done.names:
            click.echo(f"evicted {name}")
        click.echo(f"{len(done.digests)} evicted, {done.freed / MB:.1f} MB are free again")
        if everything and done.in_use:
            click.echo(f"in use, so still there: {'; '.join(done.in_use)}")
    if names and done.in_use:
        raise SandboxError(f"in use, so not evicted: {'; '.join(done.in_use)}")
