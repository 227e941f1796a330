"""`rollout slurm down`: the wait until the line is empty (--finish), and the word that it leaves behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pipeline import address_file
from pipeline.config import Config
from pipeline.errors import RedisUnavailable
from workers.slurm import status
from workers.slurm.calls import SlurmError
from workers.slurm.jobs import Jobs
from workers.slurm.status import Live
from workers.slurm.text import STAGES

log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two reports."""

LOOK = 1.0

WAYS = "`rollout slurm up` submits what is missing; `rollout slurm down` without --finish ends now, and loses nothing"


def until_empty(jobs: Jobs, look: Callable[[], Live], say: Callable[[str], None]) -> None:
    """Wait, as long as it takes, until no rollout is on its way; `say` is told each EVERY seconds what is left.

    Raises RedisUnavailable: at the first look, whether the line is empty can't be known.
    """
    found = look()
    if found.trouble:
        raise RedisUnavailable(f"whether the line is empty is not known: {found.trouble}")
    told = -EVERY
    while found.trouble or left(found):
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            say(said(found, [] if found.trouble else obstacles(jobs, found)))
        time.sleep(LOOK)
        found = look()


def left(found: Live) -> dict[str, int]:
    """Rollouts on their way, by stage."""
    return {stage: count for stage, count in found.rollouts.items() if stage != "done" and count}


def said(found: Live, why: list[str]) -> str:
    """What is left where, and what holds it up, as a sentence."""
    if found.trouble:
        return f"whether the line is empty is not known: {found.trouble}. {WAYS}"
    stages = left(found)
    many = sum(stages.values())
    what = f"{many} {'rollout is' if many == 1 else 'rollouts are'} still under way"
    where = ", ".join(f"{count} in {stage}" for stage, count in stages.items())
    return f"{what} ({where})" + (f": {'; '.join(why)}. {WAYS}" if why else "")


def obstacles(jobs: Jobs, found: Live) -> list[str]:
    """Why rollouts do not move: what the line says of itself, and of the stages that they are in, what Slurm says."""
    why = list(found.stuck)
    try:
        state, rows = jobs.look()
    except SlurmError as error:
        return [*why, str(error)]
    told = status.report(state, rows, found, jobs.logs)
    for stage in STAGES:
        item = told["kinds"][stage]
        if left(found).get(stage) and not item["workers"]:
            why += [f"{stage}: {reason}" for reason in item["why"]]
    lacks = [f"{count} of {kind}" for kind, count in status.missing(state, rows, time.time()).items()]
    if lacks and not told["kept"]:
        why.append(f"jobs are missing ({', '.join(lacks)}), and no maint task runs to replace them")
    return why


def leave_word(config: Config) -> None:
    """For workers that Slurm has lost sight of (their slurmd died): they end, rather than wait for another Redis."""
    file = address_file.file_of(config)
    if file is not None and config.slurm.redis.jobs:
        try:
            address_file.take_down(file)
        except OSError as error:
            log.warning(
                "%s can't say that the line is down: %s; a worker that Slurm lost waits on", file, error.strerror
            )
