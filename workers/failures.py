"""How an error of an attempt counts: as a failure of its own, as a loss, as the end, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import RetryConfig
from pipeline.envelope import Stage
from pipeline.errors import (
    Cancelled,
    Fatal,
    LimitExceeded,
    LineError,
    NeedsPlace,
    PayloadFolderAway,
    SandboxError,
    SandboxGone,
    WorkerLost,
)
from pipeline.leases import Failure
from workers.children import ChildDied
from workers.job import EVALUATIONS, Job

WHY_CHARACTERS = 4000
"""Of an error's sentence; some carry a whole file, and it would lie in Redis three times."""


def short(text: str) -> str:
    """The text, its middle left out where it is longer than WHY_CHARACTERS."""
    half = WHY_CHARACTERS // 2
    return text if len(text) <= WHY_CHARACTERS else f"{text[:half]} … ({len(text)} characters) … {text[-half:]}"


def times_late(attempts: Sequence[dict[str, Any]]) -> int:
    """How many evaluations were out of time since RUN last committed; other failures of theirs don't count."""
    count = 0
    for attempt in reversed(attempts):
        if attempt["stage"] == Stage.RUN.value:
            break
        count += attempt["stage"] == Stage.EVAL.value and attempt.get("kind") == LimitExceeded.kind
    return count


def failure_of(
    error: LineError, stage: Stage, attempt: int, job: Job | None, retry: RetryConfig, about: Mapping[str, str]
) -> Failure:
    """`attempt`: its number, from 1; `job`: None where it did not decode; `about`: further fields of the failure."""
    told: dict[str, Any] = {
        "kind": error.kind, "why": short(str(error)), "exit_code": str(getattr(error, "exit_code", "")), **about,
    }  # fmt: skip
    if isinstance(error, Cancelled | PayloadFolderAway):
        return Failure(mode="back", **told)
    if isinstance(error, NeedsPlace):
        return Failure(mode="back", to="place", **told)
    had = job is not None and job.envelope.sandbox is not None and stage is not Stage.INIT
    if isinstance(error, SandboxGone):
        return Failure(mode="loss", to="init" if had else "", **told)  # INIT makes another one
    if isinstance(error, WorkerLost) and not isinstance(error, ChildDied):
        return Failure(mode="loss", **told)
    late = stage is Stage.EVAL and isinstance(error, LimitExceeded)
    if isinstance(error, Fatal) or (late and job is not None and job.late + 1 >= EVALUATIONS):
        return Failure(mode="fatal", **told)
    delay = min(retry.backoff * 2.0 ** max(0, attempt - 1), retry.backoff_max)
    to = "init" if had and isinstance(error, SandboxError) and stage is Stage.RUN else ""
    return Failure(mode="attempt", delay=delay, to=to, **told)
