"""From the settings to what `rollout slurm up` writes: which jobs are wanted, their scripts, and what they run with."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from pipeline.config import CONFIG_VARIABLE, Config
from pipeline.config_slurm import KINDS
from pipeline.errors import ConfigError
from workers.slurm import state as states
from workers.slurm.calls import passed
from workers.slurm.keeper import folder_of
from workers.slurm.state import Kind, State
from workers.slurm.text import Place, text

PREFIX = "ROLLOUT_"
FOLDER_VARIABLE = "ROLLOUT_SLURM__FOLDER"

PATIENCE = 60.0
"""Seconds beyond limits.grace until a task that was told to end is cancelled: vLLM may take 20 s after its calls."""

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})

OURS = r"(--(export|array|job-name|output|signal|open-mode|requeue|no-requeue|ntasks|wrap)(?=$|[=\s])|-[aJon])"
"""Options of sbatch that the settings may not have."""

_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def check(config: Config) -> None:
    """Raises ConfigError: settings that do not fit a line on Slurm."""
    folder = folder_of(config)
    if re.search(r"[\n\"]", str(folder)):
        raise ConfigError(f"slurm.folder: {str(folder)!r} holds a quote or a line's end, which sbatch can't read")
    slurm = config.slurm
    for option in [*slurm.options, *(option for kind in KINDS for option in slurm.jobs(kind).options)]:
        if re.match(OURS, option):
            raise ConfigError(
                f"slurm.options: {option}: the line sets this itself (jobs get PATH, HOME and the like of this shell; "
                "let a line of slurm.setup export what else they need)"
            )
    if slurm.vllm.jobs and not slurm.vllm.model:
        raise ConfigError(
            f"slurm.vllm.jobs is {slurm.vllm.jobs}, but slurm.vllm.model is empty: name the model that they serve"
        )
    if config.redis.url and slurm.redis.jobs:
        raise ConfigError(
            "redis.url is set, and slurm.redis.jobs is 1: a Redis of the line's own would have no clients. Take "
            "redis.url out, or set slurm.redis.jobs to 0"
        )
    if not slurm.redis.jobs and not (config.redis.url or config.redis.address_file):
        raise ConfigError("slurm.redis.jobs is 0 and redis.url is empty: name the line's Redis, or let a job be it")


def variables(environ: Mapping[str, str], overrides: Sequence[str]) -> dict[str, str]:
    """The settings that come from this command's variables and from its --set, as variables for the jobs.

    Raises ConfigError for one that can't be passed on: a script is no place for a password.
    """
    special = (CONFIG_VARIABLE, FOLDER_VARIABLE)
    found = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in special}
    for override in overrides:
        name, _, value = override.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", name.strip()):
            raise ConfigError(f"--set {name}: jobs can't be told this by a variable: put it into the settings' file")
        found[PREFIX + name.strip().replace(".", "__").upper()] = value
    found.pop(FOLDER_VARIABLE, None)  # every script exports it
    for name, value in found.items():
        if _PASSWORD.search(value):
            raise ConfigError(
                f"{name} holds a password: Slurm stores a job's script and environment. Put it into a file "
                "(redis.password_file), or into the settings' file"
            )
    return found


def program(config: Config) -> str:
    """The program that jobs start: slurm.program, else the one that runs now. Raises ConfigError."""
    if config.slurm.program:
        return os.path.expanduser(config.slurm.program)
    for path in (Path(sys.argv[0]).absolute(), Path(sys.executable).with_name("rollout")):
        if path.name == "rollout" and path.is_file():
            return str(path)
    raise ConfigError("where `rollout` is installed is not known: name its path on the nodes in slurm.program")


def scripts(config: Config, place: Place) -> dict[str, str]:
    """Kind and script, of all kinds."""
    return {kind: text(config, kind, place) for kind in KINDS}


def place_of(config: Config, tag: str, environ: Mapping[str, str], overrides: Sequence[str]) -> Place:
    """Where the jobs of this command's line run. Raises ConfigError."""
    return Place(
        tag=tag, folder=str(folder_of(config)), config=str(config.source or ""), home=str(config.folder),
        program=program(config), variables=variables(environ, overrides),
    )  # fmt: skip


def state_of(config: Config, known: State | None, environ: Mapping[str, str], overrides: Sequence[str]) -> State:
    """What is wanted by these settings; of what `known` holds, the tasks that are on their way out stay.

    Raises ConfigError.
    """
    folder = folder_of(config)
    if known and known.line != config.line.name and any(item.jobs for item in known.kinds.values()):
        raise ConfigError(
            f"{folder} belongs to the line {known.line!r}, whose jobs are wanted, and line.name is "
            f"{config.line.name!r}: give each line a folder of its own, or `rollout slurm down` that one first"
        )
    tag = states.tag_for(folder, known)
    made = scripts(config, place_of(config, tag, environ, overrides))
    kinds = {kind: Kind(jobs=config.slurm.jobs(kind).jobs, text=made[kind]) for kind in KINDS}
    fresh = State(
        line=config.line.name, folder=str(folder), tag=tag, overlap=config.slurm.overlap,
        patience=config.limits.grace + PATIENCE, environment=passed(environ), kinds=kinds,
        sizes={kind: item.jobs for kind, item in kinds.items()},
    )  # fmt: skip
    if known is None or known.tag != tag:
        return fresh
    return replace(
        fresh,
        draining=known.draining,
        completing=known.completing,
        seen=known.seen,
        young=known.young,
        changes=known.changes + (not _same(known, fresh)),
    )


def _same(known: State, fresh: State) -> bool:
    """Whether an `up` asks for what is wanted already: whoever waits for that may go on."""
    return (known.kinds, known.environment, known.overlap) == (fresh.kinds, fresh.environment, fresh.overlap)


def changed_since(config: Config, known: State) -> str:
    """Which settings of the section `slurm` the last `up` has not seen yet, as a sentence; "" where it has seen all.

    What comes from a shell (its variables, --set, where the program lies) is left out: another shell has others.
    """
    if not any(map(known.wanted, known.kinds)):
        return ""
    place = Place(tag=known.tag, folder=known.folder, program=config.slurm.program)
    kinds = [
        kind
        for kind in KINDS
        if kind in known.kinds
        and (
            known.sizes.get(kind, config.slurm.jobs(kind).jobs) != config.slurm.jobs(kind).jobs
            or _of_settings(text(config, kind, place), config) != _of_settings(known.kinds[kind].text, config)
        )
    ]
    if not kinds and known.overlap == config.slurm.overlap:
        return ""
    about = f" ({', '.join(kinds)})" if kinds else ""
    return f"the settings have changed since the last `up`{about}: `rollout slurm up` takes them"


def _of_settings(script: str, config: Config) -> list[str]:
    """A script's lines without those that `up` takes from its shell."""
    shells = ["LINE_CONFIG=", "LINE_HOME=", f"export {PREFIX}", *([] if config.slurm.program else ["LINE_PROGRAM="])]
    lines = script.splitlines()
    return [line for line in lines if not line.startswith(tuple(shells))]


def resized(before: State | None, after: State) -> list[str]:
    """What `up` takes back of an earlier `scale`, as sentences."""
    if before is None or not any(map(before.wanted, before.kinds)):
        return []
    return [
        f"{kind}: {before.wanted(kind)} -> {after.wanted(kind)}, as the settings say"
        for kind in KINDS
        if before.wanted(kind) != after.wanted(kind)
    ]


def make_folder(folder: Path) -> str:
    """Make the line's folder, for its user alone; a warning, or "". Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "logs").mkdir(mode=0o700, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"slurm.folder {folder} can't be used: {error.strerror} ({error.filename})") from None
    mounts = [item for item in psutil.disk_partitions(all=True) if folder.is_relative_to(item.mountpoint)]
    kind = max(mounts, key=lambda item: len(item.mountpoint)).fstype if mounts else ""
    if kind in IN_MEMORY:
        return (
            f"slurm.folder {folder} lies in this machine's memory ({kind}): no other node sees it. `rollout doctor "
            "--cluster` in a job tells whether all nodes see a folder"
        )
    return ""
