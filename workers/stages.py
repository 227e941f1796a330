"""What a stage does with one rollout: open what the handler needs, call its method, gather what the next stage gets.

The same code runs in the worker's event loop and, for a rollout that must run alone, in a child process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import handlers
from pipeline.config import TRAINED, Config
from pipeline.envelope import Envelope, Payload, Stage
from pipeline.errors import (
    ContextFull,
    EvaluationTimeout,
    Fatal,
    GraderError,
    HandlerError,
    LineError,
    NeedsPlace,
    PolicyError,
    Retryable,
    Stale,
)
from pipeline.interfaces import AgentHandler, Policy, Reward
from pipeline.log import AttemptLog
from workers.clock import WorkingClock
from workers.handler_call import artifacts_of, as_reward, collected, context, wrapped
from workers.job import EVALUATIONS, Done, Job
from workers.parts import Caller, Hosts, Near, Stock
from workers.replay import Journaled, Replay


@dataclass(kw_only=True)
class Workshop:
    """What a worker process has for all its attempts. `children` None: plain methods run right here (in a child).

    `compute`: calls a function in a child; None calls it right here (a trial).
    """

    config: Config
    handlers_path: str | None = None
    stock: Stock | None = None
    hosts: Hosts | None = None
    open_stock: Callable[[], Awaitable[Stock]] | None = None
    host: Any = None
    policy: Any = None
    open_policy: Callable[[str], Any] | None = None
    policies: dict[str, Any] = field(default_factory=dict)
    children: Caller | None = None
    compute: Callable[..., Awaitable[Any]] | None = None
    _handlers: dict[str, AgentHandler] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

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
        """The policy that plays, as one attempt sees it; None where this process has none."""
        if job.task.policy == TRAINED and self.policy is None:
            return None
        return self.policy_named(job, clock, job.task.policy)

    def policy_named(self, job: Job, clock: WorkingClock, name: str) -> Policy:
        """Any policy as one attempt sees it: its calls stop that attempt's clock, carry its name and its priority.

        It is opened when the first attempt asks for it. Raises ConfigError for a name that is none, PolicyError.
        """
        if name == TRAINED:
            chosen = self.policy
        else:
            if name not in self.policies and self.open_policy is not None:
                self.policies[name] = self.open_policy(name)
            chosen = self.policies.get(name)
        if chosen is None:
            place = "policy.url" if name == TRAINED else f"policies.{name}.url"
            raise PolicyError(f"this process reaches no policy {name!r}: it has no Redis, so set {place}")
        view: Policy = chosen.bound(clock, f"{job.id}-{job.token}", urgency(job.envelope))
        return view

    async def need_stock(self) -> Stock:
        """The sandboxes of this process, opened with the first one."""
        async with self._opening:
            if self.stock is None:
                if self.open_stock is None:
                    raise HandlerError("this handler needs a sandbox, and this process makes none")
                self.stock = await self.open_stock()
        return self.stock


def urgency(envelope: Envelope) -> int:
    """What a policy server sorts calls by, lowest first: a higher priority of the line, then the older group."""
    return int(envelope.enqueued) - (envelope.priority << 32)


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
    if not handler.acts:
        payload, _ = await _call(job, "init", handler, shop, log, clock)
        return Done(envelope=job.envelope.advance(sandbox=None), payload=payload or None, restart="run")
    restart = "run" if handler.resumable else "init"
    if job.made is not None:
        payload, _ = await _call(job, "init", handler, shop, log, clock, await _far(job, handler, shop, job.made))
        return Done(envelope=job.envelope.advance(sandbox=job.made), payload=payload, restart=restart)
    made = await prepare(job, handler, shop)
    try:
        payload, _ = await _call(job, "init", handler, shop, log, clock, made.session)
    except BaseException:
        await (await shop.need_stock()).discard(made.reference["name"])
        raise
    return Done(envelope=job.envelope.advance(sandbox=made.reference), payload=payload, restart=restart)


async def prepare(job: Job, handler: AgentHandler, shop: Workshop) -> Near:
    """Make the rollout's sandbox in this process. Raises NeedsPlace where no place was claimed for it."""
    if not job.place:
        raise NeedsPlace(f"{job.task.handler} needs a sandbox: the rollout waits for a host with room")
    stock = await shop.need_stock()
    asked = _asked(handler, job)
    return await stock.prepare(asked, id=job.id, token=job.token, lane=job.envelope.lane)


def _asked(handler: AgentHandler, job: Job) -> dict[str, Any]:
    """The sandbox that this task wants. Raises what `sandbox_for` raises, as an error of the line."""
    task = handlers.check_task(handler, job.task.data)
    try:
        asked = handler.sandbox_for(task)
    except (Retryable, Fatal):
        raise
    except Exception as error:
        raise HandlerError(f"{job.task.handler}.sandbox_for raised {type(error).__name__}: {error}") from error
    if not isinstance(asked, dict):
        raise HandlerError(f"{job.task.handler}.sandbox_for gave {asked!r:.80}: it must give a map of settings")
    return asked


async def _run(job: Job, handler: AgentHandler, shop: Workshop, log: AttemptLog, clock: WorkingClock) -> Done:
    reference = job.envelope.sandbox
    sandbox = await _far(job, handler, shop, reference) if reference is not None else None
    payload, _ = await _call(job, "run", handler, shop, log, clock, sandbox)
    keeps = reference if handler.eval_sandbox == "same" else None
    return Done(envelope=job.envelope.advance(sandbox=keeps), payload=payload)


async def _eval(job: Job, handler: AgentHandler, shop: Workshop, log: AttemptLog, clock: WorkingClock) -> Done:
    reference = job.envelope.sandbox
    try:
        if handler.eval_sandbox in ("fresh", "only"):
            reward = await _eval_fresh(job, handler, shop, log, clock)
        else:
            sandbox = await _far(job, handler, shop, reference) if reference is not None else None
            _, reward = await _call(job, "eval", handler, shop, log, clock, sandbox)
    except EvaluationTimeout as error:
        reward = _timed_out(job, error, shop, log)
    if reward is None:
        raise GraderError(f"{job.task.handler}.eval returned None: it must return a number or a Reward")
    return Done(envelope=job.envelope.advance(sandbox=None), reward=reward)


def _timed_out(job: Job, error: EvaluationTimeout, shop: Workshop, log: AttemptLog) -> Reward:
    """The score of an evaluation that was out of time twice. Raises EvaluationTimeout where that is none.

    A reward of 0 teaches the policy not to hang or slow down the tests; where the tests themselves may be what hangs,
    it would teach nothing true: so only tasks whose right answer is known to pass here, in time, are scored so.
    """
    told = dict(error.evidence)
    said = told.pop("log", "")  # before the rest: of a long log the head may go
    log.keep(f"{said}\n{error}\nwhat had run: {json.dumps(told, default=str, ensure_ascii=False)}\n")
    if job.late + 1 < EVALUATIONS or shop.config.limits.eval_timeout != "zero" or not is_validated(job, shop):
        raise error
    return Reward(value=0.0, parts={"timeout": 1.0}, evidence={"why": str(error), **error.evidence})


def is_validated(job: Job, shop: Workshop) -> bool:
    """Whether this task's gold passed on this line, with the handler's code as it is now."""
    found = job.task.validated
    return (
        bool(found)
        and found.get("line") == shop.config.line.name
        and (found.get("handler") == shop.digest(job.task.handler))
    )


async def _eval_fresh(
    job: Job, handler: AgentHandler, shop: Workshop, log: AttemptLog, clock: WorkingClock
) -> Reward | None:
    """Score in a sandbox of this process that lives as long as the attempt."""
    stock = await shop.need_stock()
    with clock.paused("waits for a place for its fresh sandbox"):
        await stock.wait_for_place(job.token, job.envelope.lane)
    try:
        made = await prepare(replace(job, place=True), handler, shop)
        _, reward = await _call(job, "eval", handler, shop, log, clock, made.session)
        return reward
    finally:
        stock.release(job.token)
        await stock.discard(f"{job.id}-{job.token}")


async def _far(job: Job, handler: AgentHandler, shop: Workshop, reference: dict[str, Any]) -> Any:
    """The rollout's sandbox, which another process holds (in a trial, this one): this attempt becomes its only user."""
    if shop.hosts is not None:
        return await shop.hosts.open(
            reference, id=job.id, token=job.token, stage=job.stage.value, resume=handler.resumable
        )
    near = shop.stock.get(str(reference.get("name"))) if shop.stock is not None else None
    if near is None:
        raise HandlerError("this handler needs a sandbox, and this process reaches none")
    await near.session.fresh()
    return near.session


async def _call(
    job: Job,
    method: str,
    handler: AgentHandler,
    shop: Workshop,
    log: AttemptLog,
    clock: WorkingClock,
    sandbox: Any = None,
) -> tuple[Payload, Reward | None]:
    """Call one method of the handler where it belongs: coroutines here, plain functions in a child."""
    function = getattr(handler, method)
    if not inspect.iscoroutinefunction(function) and shop.children is not None:
        return await shop.children.method(job, method, log)
    ctx = context(job, handler, log, shop.config.policy.max_turns, artifacts_of(shop.config, job.id))
    ctx.sandbox, ctx._policy = sandbox, shop.policy_for(job, clock)
    ctx._policies = partial(shop.policy_named, job, clock)
    if shop.compute is not None:
        ctx._compute = partial(shop.compute, job, log)
    if method == "run" and handler.resumable and ctx._policy is not None and isinstance(sandbox, Journaled):
        ctx._policy = Replay(ctx._policy, sandbox)
    ctx.deadline = clock.limit
    try:
        try:
            answer = function(ctx)
            if inspect.isawaitable(answer):
                answer = await answer
        finally:
            log.sampled = ctx.trajectory.sampled
            _check_whole(sandbox, ctx._policy)
    except (Retryable, Fatal, Stale):
        raise
    except ContextFull as error:
        if method != "run":
            raise wrapped(job.task.handler, job.stage, error, log) from error
        ctx.trajectory.truncated, answer = "context", None
    except (Exception, SystemExit) as error:  # `exit()` in a handler must not end the worker
        raise wrapped(job.task.handler, job.stage, error, log) from error
    return collected(job, ctx), as_reward(job, answer) if method == "eval" else None


def _check_whole(*parts: Any) -> None:
    """Raise what a handler may have caught: what a sandbox that is gone did not do is nothing to go on with."""
    for part in parts:
        broken = getattr(part, "broken", None)
        if isinstance(broken, LineError):
            raise broken
