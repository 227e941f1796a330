"""What a stage does with one rollout: open what the handler needs, call its method, gather what the next stage gets.

The same code runs in the worker's event loop and, for a rollout that must run alone, in a child process.
"""

from __future__ import annotations

import inspect
import json
import traceback
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import handlers
from pipeline.builder import TrajectoryBuilder
from pipeline.config import Config
from pipeline.envelope import Envelope, Payload, Stage, Task
from pipeline.errors import ContextFull, Fatal, GraderError, HandlerError, LineError, Retryable
from pipeline.interfaces import AgentHandler, Context, Policy, Reward
from pipeline.log import AttemptLog
from workers.clock import WorkingClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt's input."""

    stage: Stage
    id: str
    token: str
    attempt: int
    envelope: Envelope
    task: Task
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One attempt's result. `payload` None keeps the one that is there; `freed` is discarded after the commit."""

    envelope: Envelope
    payload: Payload | None = None
    reward: Reward | None = None
    restart: str = ""
    freed: dict[str, Any] | None = None


class Driver(Protocol):
    """A sandbox driver."""

    async def prepare(self, spec: dict[str, Any], name: str) -> dict[str, Any]: ...

    async def open(self, reference: dict[str, Any]) -> Any: ...

    async def discard(self, reference: dict[str, Any]) -> None: ...

    async def owned(self) -> list[dict[str, Any]]: ...


class Caller(Protocol):
    """Runs a plain `def` method in a child process."""

    async def method(self, job: Job, name: str, log: AttemptLog) -> tuple[Payload, Reward | None]: ...


@dataclass(kw_only=True)
class Workshop:
    """What a worker process has for all its attempts. `children` None: plain methods run right here (in a child)."""

    config: Config
    handlers_path: str | None = None
    driver: Driver | None = None
    policy: Any = None
    children: Caller | None = None
    _handlers: dict[str, AgentHandler] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)

    def handler(self, name: str) -> AgentHandler:
        """The handler of this name, loaded once. Raises UnknownHandler, HandlerError."""
        if name not in self._handlers:
            self._handlers[name] = handlers.load(name, self.handlers_path)
        return self._handlers[name]

    def digest(self, name: str) -> str:
        """Which code the handler is; empty where it can't be told (it does not load)."""
        if name not in self._digests:
            try:
                self._digests[name] = handlers.digest(self.handler(name))
            except HandlerError:
                return ""
        return self._digests[name]

    def policy_for(self, job: Job, clock: WorkingClock) -> Policy | None:
        """The policy as one attempt sees it: its calls stop that attempt's clock and carry its name."""
        return self.policy.bound(clock, f"{job.id}-{job.token}") if self.policy is not None else None

    def need_driver(self) -> Driver:
        if self.driver is None:
            raise HandlerError("this handler needs a sandbox, and this worker has no sandbox driver (sandbox.driver)")
        return self.driver


async def process(job: Job, shop: Workshop, log: AttemptLog, clock: WorkingClock) -> Done:
    """Do one stage. Raises LineError's branches; a handler's own error comes as HandlerError or GraderError."""
    handler = shop.handler(job.task.handler)
    if job.stage is Stage.INIT:
        return await _init(job, handler, shop, log, clock)
    if job.stage is Stage.RUN:
        return await _run(job, handler, shop, log, clock)
    return await _eval(job, handler, shop, log, clock)


async def _init(job: Job, handler: AgentHandler, shop: Workshop, log: AttemptLog, clock: WorkingClock) -> Done:
    handlers.check_task(handler, job.task.data)
    if handler.sandbox is None:
        payload, _ = await _call(job, "init", handler, shop, log, clock)
        return Done(envelope=job.envelope.advance(sandbox=None), payload=payload or None, restart="run")
    driver = shop.need_driver()
    reference = await driver.prepare(dict(handler.sandbox), f"{job.id}-{job.token}")
    try:
        payload, _ = await _call(job, "init", handler, shop, log, clock, reference)
    except BaseException:
        await driver.discard(reference)
        raise
    return Done(envelope=job.envelope.advance(sandbox=reference), payload=payload, restart="init")


async def _run(job: Job, handler: AgentHandler, shop: Workshop, log: AttemptLog, clock: WorkingClock) -> Done:
    reference = job.envelope.sandbox
    payload, _ = await _call(job, "run", handler, shop, log, clock, reference)
    if reference is None or handler.eval_sandbox == "same":
        return Done(envelope=job.envelope, payload=payload)
    return Done(envelope=job.envelope.advance(sandbox=None), payload=payload, freed=reference)


async def _eval(job: Job, handler: AgentHandler, shop: Workshop, log: AttemptLog, clock: WorkingClock) -> Done:
    reference = job.envelope.sandbox
    _, reward = await _call(job, "eval", handler, shop, log, clock, reference)
    if reward is None:
        raise GraderError(f"{job.task.handler}.eval returned None: it must return a number or a Reward")
    return Done(envelope=job.envelope.advance(sandbox=None), reward=reward, freed=reference)


async def _call(
    job: Job,
    method: str,
    handler: AgentHandler,
    shop: Workshop,
    log: AttemptLog,
    clock: WorkingClock,
    reference: dict[str, Any] | None = None,
) -> tuple[Payload, Reward | None]:
    """Call one method of the handler where it belongs: coroutines here, plain functions in a child."""
    function = getattr(handler, method)
    if not inspect.iscoroutinefunction(function) and shop.children is not None:
        return await shop.children.method(job, method, log)
    session = await shop.need_driver().open(reference) if reference is not None else None
    ctx = context(job, handler, log, shop.config.policy.max_turns)
    ctx.sandbox, ctx._policy = session, shop.policy_for(job, clock)
    ctx.deadline = clock.limit
    try:
        answer = function(ctx)
        if inspect.isawaitable(answer):
            answer = await answer
    except (Retryable, Fatal):
        raise
    except ContextFull as error:
        if method != "run":
            raise wrapped(job, error, log) from error
        ctx.trajectory.truncated, answer = "context", None
    except (Exception, SystemExit) as error:  # `exit()` in a handler must not end the worker
        raise wrapped(job, error, log) from error
    finally:
        if session is not None:
            await session.close()
    return collected(job, ctx), as_reward(job, answer) if method == "eval" else None


def context(job: Job, handler: AgentHandler, log: AttemptLog, max_turns: int) -> Context:
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


def wrapped(job: Job, error: BaseException, log: AttemptLog) -> LineError:
    """A handler's plain Python error: it ends the rollout in INIT and RUN, in EVAL the grader is tried again."""
    log.keep("".join(traceback.format_exception(error)))
    what = f"{job.task.handler}.{job.stage} raised {type(error).__name__}: {error}"
    return GraderError(what) if job.stage is Stage.EVAL else HandlerError(what)


def sandbox_text(reference: dict[str, Any] | None) -> str:
    """How the rollout's hash names its sandbox; empty for none."""
    return json.dumps(reference, sort_keys=True) if reference else ""
