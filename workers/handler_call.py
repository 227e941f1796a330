"""What goes into a call of a handler's method and what comes out: its context, the next stage's payload, its errors."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import handlers
from pipeline.builder import TrajectoryBuilder
from pipeline.config import Config
from pipeline.envelope import Payload, Stage
from pipeline.errors import GraderError, HandlerError, LineError
from pipeline.interfaces import AgentHandler, Context, Reward
from pipeline.log import AttemptLog
from workers.job import Job


def artifacts_of(config: Config, id: str) -> Path | None:
    """The folder of one rollout's artifacts; None where none are kept."""
    folder = config.artifacts.folder
    return config.path_of(folder) / config.line.name / id.replace("/", "_") if folder else None


def context(job: Job, handler: AgentHandler, log: AttemptLog, max_turns: int, artifacts: Path | None = None) -> Context:
    """The handler's view of a job; no sandbox and no policy yet."""
    trajectory = job.payload.trajectory if job.stage is Stage.EVAL else None
    builder = TrajectoryBuilder.of(trajectory) if trajectory is not None else TrajectoryBuilder()
    builder.truncated = job.payload.truncated
    return Context(
        id=job.id,
        group=job.envelope.group,
        sample=job.envelope.sample,
        lane=job.envelope.lane,
        attempt=job.attempt,
        task=handlers.check_task(handler, job.task.data),
        log=log,
        sampling=dict(job.task.sampling),
        limits=dict(job.task.limits),
        state=dict(job.payload.state),
        trajectory=builder,
        max_turns=int(job.task.limits.get("max_turns", max_turns)),
        _artifacts=artifacts,
    )


def collected(job: Job, ctx: Context) -> Payload:
    """What the method left behind, as the next stage's payload."""
    if job.stage is Stage.RUN:
        return replace(
            job.payload, state=ctx.state, trajectory=ctx.trajectory.build(), truncated=ctx.trajectory.truncated
        )
    return replace(job.payload, state=ctx.state)


def as_reward(job: Job, answer: Any) -> Reward | None:
    """A handler's score as a Reward. Raises GraderError for what is no finite number."""
    if answer is None:
        return None
    value = answer.value if isinstance(answer, Reward) else answer
    try:
        number = float(None if isinstance(value, str | bytes) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise GraderError(
            f"{job.task.handler}.eval returned {value!r:.80}: it must return a number or a Reward"
        ) from None
    if not abs(number) < float("inf"):
        raise GraderError(f"{job.task.handler}.eval returned {value!r:.80}: a reward must be a finite number")
    return replace(answer, value=number) if isinstance(answer, Reward) else Reward(value=number)


def wrapped(handler: str, stage: Stage, error: BaseException, log: AttemptLog) -> LineError:
    """A handler's plain Python error: it ends the rollout in INIT and RUN, in EVAL the grader is tried again."""
    log.keep("".join(traceback.format_exception(error)))
    what = f"{handler}.{stage} raised {type(error).__name__}: {error}"
    return GraderError(what) if stage is Stage.EVAL else HandlerError(what)
