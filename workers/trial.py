"""`rollout try`: one rollout in this process. No Redis, no child processes: a breakpoint or a debugger just works."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.text import Text

from pipeline.config import Config
from pipeline.envelope import NEXT, Envelope, Payload, Stage, Task
from pipeline.errors import HandlerError, LimitExceeded, LineError, TaskError
from pipeline.interfaces import Completion, Reward
from pipeline.log import AttemptLog
from workers import view
from workers.clock import WorkingClock
from workers.job import Done, Job
from workers.policy import scripted, tokenizer
from workers.stages import Workshop, process
from workers.workshop import close, handlers_path, open_workshop

HOME = Path(__file__).resolve().parents[1]
OURS = (HOME / "pipeline", HOME / "workers")

WAIT_SECONDS = 15.0
"""For a real server that does not answer: a person waits, and no other one is on its way."""


@dataclass(kw_only=True)
class Trial:
    """What came of it. `reward` is None when it failed; `seconds` by stage. `spoke`: the policy was called.

    `log`: the end of what the last stage logged.
    """

    reward: Reward | None = None
    payload: Payload = field(default_factory=Payload)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: LineError | None = None
    spoke: bool = False
    log: str = ""

    @property
    def error(self) -> BaseException | None:
        """The user's own exception where there is one."""
        return (self.failed.__cause__ or self.failed) if self.failed else None


class Loud:
    """A policy that prints what is new on its way to the model, and what comes back. `said` counts the replies."""

    def __init__(self, inner: Any, said: list[int] | None = None) -> None:
        self._inner = inner
        self._shown: list[int] = []
        self.said: list[int] = [] if said is None else said

    def bound(self, *about: Any) -> Loud:
        return Loud(self._inner.bound(*about), self.said)

    def __getattr__(self, name: str) -> Any:
        """Everything but `generate` is the real policy's."""
        return getattr(self._inner, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        known = list(prompt_ids)
        if known[: len(self._shown)] != self._shown:
            _print(Text("--- the history was rendered anew ---", style="yellow"))
            self._shown = []
        fresh = self._inner.text(known[len(self._shown) :])
        _print(Text(fresh, style=view.STYLES["observation" if self._shown else "prompt"]), end="")
        done: Completion = await self._inner.generate(prompt_ids, sampling)
        said = self._inner.text(list(done.ids))
        _print(Text(said if view.console().is_terminal else f"⟦{said}⟧", style=view.STYLES["action"]))
        _print(Text(f"[{len(done.ids)} tokens, {done.finish_reason}, {view.seconds(done.seconds)}]", style="yellow"))
        self._shown = [*known, *done.ids]
        self.said.append(len(done.ids))
        return done


def _print(text: Text, end: str = "\n") -> None:
    view.console().print(text, end=end, soft_wrap=True)


def policy_for(
    config: Config, answers: dict[str, Any], stack: ExitStack, says: str = ""
) -> tuple[Config, scripted.Options | None]:
    """The configuration with a tokenizer, and how to start a scripted policy: None where there is a real one."""
    if config.policy.url:
        return config.changed({"limits.policy_wait": min(config.limits.policy_wait, WAIT_SECONDS)}), None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-try-")))
    made = tokenizer.make(folder)
    chosen = {"policy.tokenizer": str(folder), "policy.renderer": "qwen3"}
    return config.changed(chosen), scripted.Options(
        tokenizer=made, answers=answers, model=config.policy.model, p_correct=1.0, says=says
    )


async def play(config: Config, task: Task, options: scripted.Options | None, *, loud: bool = True) -> Trial:
    """INIT, RUN and EVAL of one rollout, here. A failure is in the result, not raised; ConfigError and the like are."""
    server = await scripted.start(options) if options is not None else None
    shop = None
    try:
        if server is not None:
            config = config.changed({"policy.url": server.url})
        shop = await open_workshop(config, handlers_path(config), children=False, alone=True)
        if loud and shop.policy is not None:
            shop.policy = Loud(shop.policy)
        trial = await stages(shop, task)
        trial.spoke = isinstance(shop.policy, Loud) and bool(shop.policy.said)
        return trial
    finally:
        if shop is not None:
            await close(shop)
        if server is not None:
            await server.stop()


async def stages(shop: Workshop, task: Task, *, sample: str = "0", token: str = "try", attempt: int = 1) -> Trial:
    """One rollout, GROUP.`sample`, through INIT, RUN and EVAL in this process. A failure is in the result.

    It waits for a place for its sandbox, and leaves none behind. `token` must be its own among those that run at once;
    `attempt` is what its stages are told.
    """
    group = task.id or "try"
    job = Job(
        stage=Stage.INIT, id=f"{group}.{sample}", token=token, attempt=attempt, task=task, payload=Payload(),
        envelope=Envelope(id=f"{group}.{sample}", group=group, handler=task.handler), place=True,
    )  # fmt: skip
    trial = Trial()
    try:
        if shop.handler(task.handler).acts:
            await (await shop.need_stock()).wait_for_place(token, job.envelope.lane)
        while job.stage is not Stage.DONE:
            log = AttemptLog(logging.getLogger("try"), rollout=job.id, stage=job.stage.value)
            clock, began = WorkingClock(_limit(shop.config, job)), time.monotonic()
            try:
                done = await _within(clock, process(job, shop, log, clock), job.stage)
            finally:
                trial.seconds[job.stage.value] = round(time.monotonic() - began, 4)
                trial.log = log.tail
            if job.envelope.sandbox is not None and done.envelope.sandbox is None and shop.stock is not None:
                await shop.stock.discard(job.envelope.sandbox["name"])  # as a host does; EVAL may want its place
            job = replace(job, stage=NEXT[job.stage], envelope=done.envelope, payload=done.payload or job.payload)
            trial.payload, trial.reward = job.payload, done.reward
    except LineError as error:
        trial.failed = error
    finally:
        if shop.stock is not None:
            shop.stock.release(token)
            await shop.stock.discard(f"{job.id}-{token}")
    return trial


def _limit(config: Config, job: Job) -> float:
    return float(job.task.limits.get(job.stage.value, getattr(config.limits, job.stage.value)))


async def _within(clock: WorkingClock, work: Coroutine[Any, Any, Done], stage: Stage) -> Done:
    """The work's result. Raises LimitExceeded when the clock is over; what waits for a place stops it."""
    doing = asyncio.create_task(work)
    try:
        while not doing.done():
            await asyncio.wait({doing}, timeout=max(clock.remaining, 0.001))
            if not doing.done() and clock.remaining <= 0:
                raise LimitExceeded(f"{stage} worked for {clock.limit:g} s, its limit (limits.{stage})")
        return doing.result()
    finally:
        doing.cancel()
        await asyncio.wait({doing})
        if not doing.cancelled():
            doing.exception()  # so that nobody complains of one that nobody asked for


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames in files of the user's: neither ours nor a library's. Of a built-in handler its own."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]


def _is_users(filename: str) -> bool:
    path = Path(filename).resolve()
    if any(path.is_relative_to(folder) for folder in OURS) or filename.startswith("<"):
        return False
    return not any(part in ("site-packages", "dist-packages") or part.startswith("python3.") for part in path.parts)


def users_traceback(failed: LineError) -> str:
    """The traceback of what went wrong with the user's frames alone.

    Where it has none of them: the whole one of an exception that some handler raised; nothing for a fault of the
    sandbox, the policy, a setting or an image, whose sentence says it all.
    """
    error = failed.__cause__ or failed
    frames = [] if isinstance(failed, TaskError) else users_frames(error)  # the task is wrong, no code is
    if not frames:
        raised = isinstance(failed, HandlerError) and not isinstance(error, LineError)
        return "".join(traceback.format_exception(error)) if raised else ""
    lines = ["Traceback (your own code; --traceback shows all of it):\n", *traceback.format_list(frames)]
    return "".join([*lines, *traceback.format_exception_only(error)])


def users_place(error: BaseException) -> TracebackType | None:
    """Where a debugger should begin: the traceback from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace or error.__traceback__
