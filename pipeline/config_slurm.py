"""The settings' section `slurm`: where the line's jobs run, how many of each kind, and what each of them gets."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Period = Annotated[float, Field(gt=0)]
TimeLimit = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")]
"""As Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]."""

Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,+-]*$")]
Option = Annotated[str, StringConstraints(pattern=r"^--?[a-zA-Z][^\n]*$")]
OneLine = Annotated[str, StringConstraints(pattern=r"^[^\n]*$")]

KINDS = ("redis", "init", "run", "eval", "maint", "vllm")
"""The kinds of the line's jobs, in the order in which they are submitted."""


def seconds_of(limit: str) -> int:
    """The seconds of a time limit as Slurm writes it (see TimeLimit)."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in re.split(":", rest)]
    if days:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


class Closed(BaseModel):
    """As every section: frozen, strict, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class JobsConfig(Closed):
    """One kind of job: an array of `jobs` tasks, each with these resources."""

    jobs: Count = 1
    cpus: AtLeastOne = 4
    memory_mb: AtLeastOne = 8192
    gpus: Count = 0
    time: TimeLimit = "4:00:00"
    partition: Word = ""
    options: list[Option] = Field(default_factory=list)


class RedisJobConfig(JobsConfig):
    """The job of the line's Redis: one at a time. `jobs` 0: the line has a Redis elsewhere (redis.url)."""

    jobs: Annotated[int, Field(ge=0, le=1)] = 1
    cpus: AtLeastOne = 2
    memory_mb: AtLeastOne = 16_384
    time: TimeLimit = "2-00:00:00"


class VllmJobsConfig(JobsConfig):
    """Policy servers, one a task."""

    jobs: Count = 0
    cpus: AtLeastOne = 8
    memory_mb: AtLeastOne = 65_536
    gpus: Count = 1
    model: OneLine = ""
    arguments: list[OneLine] = Field(default_factory=list)


class SlurmConfig(Closed):
    """The line on a Slurm cluster."""

    folder: str = ""
    partition: Word = ""
    account: Word = ""
    options: list[Option] = Field(default_factory=list)
    setup: list[OneLine] = Field(default_factory=list)
    program: OneLine = ""
    signal: AtLeastOne = 120
    overlap: Period = 600.0
    look: Period = 30.0
    lock: Period = 10.0
    redis: RedisJobConfig = RedisJobConfig()
    init: JobsConfig = JobsConfig(jobs=2)
    run: JobsConfig = JobsConfig(jobs=2, cpus=2)
    eval: JobsConfig = JobsConfig(jobs=2)
    maint: JobsConfig = JobsConfig(jobs=2, cpus=1, memory_mb=2048)
    vllm: VllmJobsConfig = VllmJobsConfig()

    def jobs(self, kind: str) -> JobsConfig:
        """The settings of one of KINDS."""
        found: JobsConfig = getattr(self, kind)
        return found

    def wrong(self, grace: float) -> str:
        """What does not fit together, as a sentence; empty when all does. `grace`: limits.grace (s)."""
        if self.signal < grace + 10:
            return (
                f"slurm.signal: {self.signal} s before a job's end is too late for limits.grace ({grace:g} s): its "
                "worker needs at least 10 s more than that"
            )
        if self.overlap <= self.signal:
            return (
                f"slurm.overlap: {self.overlap:g} s must be longer than slurm.signal ({self.signal} s): a job is "
                "replaced before it is told to end"
            )
        for kind in KINDS:
            limit = self.jobs(kind).time
            if seconds_of(limit) <= self.overlap:
                return (
                    f"slurm.{kind}.time: {limit} is no longer than slurm.overlap ({self.overlap:g} s): such a job "
                    "would be replaced as soon as it runs; make the overlap shorter, or the limit longer"
                )
        return ""
