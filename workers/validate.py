"""`rollout task validate`: does the right answer of each task pass here, and does an empty one fail?

Both are played as rollouts through INIT, RUN and EVAL in this process: plain methods in child processes, in as many
sandboxes at once as `sandbox.max_live` allows. What speaks is nobody's model: it says the task's gold, or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

import handlers
from pipeline.config import TRAINED, Config
from pipeline.envelope import Task
from pipeline.errors import ConfigError, EvaluationTimeout, LineError, Retryable
from pipeline.interfaces import Completion
from workers import trial
from workers.policy import tokenizer
from workers.policy.rendering import Rendering
from workers.policy.scripted_speech import Speech
from workers.stages import Workshop
from workers.workshop import close, handlers_path, open_workshop

Outcome = Literal["ok", "gold fails", "unsteady", "empty passes", "no gold", "error"]

CONTEXT = 1 << 20
"""Tokens that a right answer may take, whatever the window of the model that is trained: it is not about that model."""

ATTEMPTS = 2
"""Plays of one answer where the machine, not the answer, is what failed."""


@dataclass(kw_only=True)
class Verdict:
    """What was found about one task. `gold`, `empty`: rewards, None where there was none (`gold`: the lowest).

    `seconds`: of the gold's evaluation (the longest); `took`: of all plays. `log`: the end of the log that says why.
    """

    number: int
    id: str
    handler: str
    verdict: Outcome = "ok"
    why: str = ""
    gold: float | None = None
    empty: float | None = None
    seconds: float = 0.0
    took: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def record(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


class Told:
    """A policy that says what it was told to: `answers` by attempt (rollout id and token); to others it says nothing.

    An answer is the handler's `gold`: a text, or one message for each time that the policy speaks.
    """

    def __init__(self, rendering: Rendering, answers: dict[str, Any] | None = None, name: str = "") -> None:
        """`name`: the attempt whose view it is."""
        self.answers: dict[str, Any] = {} if answers is None else answers
        self.context = CONTEXT
        self._rendering = rendering
        self._name = name
        self._spoken = 0

    def __getattr__(self, name: str) -> Any:
        """`render`, `parse`, `bridge`, `text`, `ready`."""
        return getattr(self._rendering, name)

    def bound(self, clock: object = None, name: str = "", priority: int | None = None) -> Told:
        return Told(self._rendering, self.answers, name)

    async def close(self) -> None:
        """Nothing is open."""

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        ids = self._ids(self.answers.get(self._name), prompt_ids)
        self._spoken += 1
        return Completion(ids=ids, logprobs=[-0.1] * len(ids), versions=[(0, 0, len(ids))], finish_reason="stop")

    def _ids(self, answer: Any, prompt_ids: Sequence[int]) -> list[int]:
        if isinstance(answer, str) and "\n" not in answer:  # said in the form that the question asks for
            prompt, speech = np.asarray(prompt_ids, np.uint32), Speech(self._rendering, p_correct=1.0, drift=0.0)
            speech.answers[speech.question(prompt)] = answer
            return speech.reply(prompt, random.Random(0)).ids
        turns = [answer] if isinstance(answer, str) else answer or []
        says = turns[self._spoken] if self._spoken < len(turns) else ""
        said: Any = {"role": "assistant", "content": says} if isinstance(says, str) else says
        return self._rendering.spoken(said)


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Workshop]:
    """A workshop whose policy is a `Told`; its sandboxes are gone at the end, however that comes."""
    with tempfile.TemporaryDirectory(prefix="rollout-validate-") as folder:
        rendering = Rendering(tokenizer.make(Path(folder)), "qwen3")
        wait = min(config.limits.policy_wait, trial.WAIT_SECONDS)  # for another policy that a handler asks, a judge
        config = config.changed({"policy.url": "", "limits.policy_wait": wait})
        shop = await open_workshop(config, handlers_path(config), alone=True)
        shop.policy = Told(rendering)
        try:
            yield shop
        finally:
            await _surely(close(shop))


async def _surely(work: Coroutine[Any, Any, None]) -> None:
    """Await the work to its end; a cancel (Ctrl-C is repeated until all has ended) must not leave sandboxes behind."""
    doing = asyncio.create_task(work)
    while not doing.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({doing})
    doing.result()


async def validate(
    shop: Workshop,
    tasks: Iterable[Task],
    *,
    jobs: int,
    repeat: int = 1,
    passes: float = 1.0,
    found: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """A verdict for each task, in their order; `found` hears of each as it comes.

    `jobs`: tasks at once. `repeat`: plays of each gold. `passes`: the least reward of a right answer. Raises
    ConfigError where the settings, not a task, are what is wrong.
    """
    left = enumerate(tasks)
    verdicts: dict[int, Verdict] = {}

    async def work() -> None:
        for number, task in left:
            verdicts[number] = await Validation(shop, number, task, repeat, passes).verdict()
            found(verdicts[number])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(work())
    except BaseExceptionGroup as errors:  # of several the first one says enough
        raise errors.exceptions[0] from None
    return [verdicts[number] for number in sorted(verdicts)]


class Validation:
    """One task's plays."""

    def __init__(self, shop: Workshop, number: int, task: Task, repeat: int, passes: float) -> None:
        self._shop, self._number = shop, number
        self._task = replace(task, id=task.id or f"task-{number}", policy=TRAINED)  # whoever should play: `Told` does
        self._repeat, self._passes = repeat, passes
        self._found = Verdict(number=number, id=str(self._task.id), handler=task.handler)

    async def verdict(self) -> Verdict:
        began = asyncio.get_running_loop().time()
        try:
            gold = self._gold()
            if gold:
                await self._judge(gold)
            else:
                self._say("no gold", "its handler knows no right answer for it (`gold`)")
        except ConfigError:
            raise
        except LineError as error:
            self._say("error", f"{error.kind}: {error}")
        self._found.took = round(asyncio.get_running_loop().time() - began, 3)
        return self._found

    def _gold(self) -> Any:
        handler = self._shop.handler(self._task.handler)
        task = handlers.check_task(handler, self._task.data)
        try:
            return handler.gold(task)
        except LineError:
            raise
        except Exception as error:
            raise LineError(f"{self._task.handler}.gold raised {type(error).__name__}: {error}") from error

    async def _judge(self, gold: Any) -> None:
        plays = [await self._play(f"gold{number}", gold) for number in range(1, self._repeat + 1)]
        for play in plays:
            if play.failed is not None and not isinstance(play.failed, EvaluationTimeout):
                self._blame("error", play)
                return
        right = [play for play in plays if self._is_right(play)]
        self._found.seconds = max(play.seconds.get("eval", 0.0) for play in plays)
        self._found.gold = min((play.reward.value for play in plays if play.reward), default=None)
        if len(right) < len(plays):
            self._blame("unsteady" if right else "gold fails", next(play for play in plays if play not in right))
            if right:
                self._found.why = f"{len(plays) - len(right)} of {len(plays)} plays of the gold failed: " + (
                    self._found.why
                )
            return
        empty = await self._play("empty", None)
        self._found.empty = empty.reward.value if empty.reward else None
        if empty.failed is not None and not isinstance(empty.failed, EvaluationTimeout):
            self._blame("error", empty)
        elif self._is_right(empty):
            self._blame("empty passes", empty)

    def _is_right(self, play: trial.Trial) -> bool:
        return play.reward is not None and play.reward.value >= self._passes

    async def _play(self, name: str, answer: Any) -> trial.Trial:
        """Play once, and once more where the machine failed."""
        for attempt in range(1, ATTEMPTS + 1):
            token = f"{self._number}-{name}-{attempt}"
            told = f"{self._task.id}.{name}-{token}"
            self._shop.policy.answers[told] = answer
            try:
                play = await trial.stages(self._shop, self._task, sample=name, token=token, attempt=attempt)
            finally:
                del self._shop.policy.answers[told]
            if not isinstance(play.failed, Retryable):
                break
        return play

    def _blame(self, verdict: Outcome, play: trial.Trial) -> None:
        """The verdict, with what the play that it comes from says of itself."""
        found = self._found
        if play.failed is not None:
            self._say(verdict, f"{play.failed.kind}: {play.failed}")
            found.log = play.log
            found.evidence = dict(getattr(play.failed, "evidence", {}))
        elif play.reward is not None:
            why = play.reward.evidence.get("why", "")
            self._say(verdict, f"reward {play.reward.value:g}{f': {why}' if why else ''}")
            found.log, found.evidence = str(play.reward.evidence.get("log") or play.log), play.reward.evidence

    def _say(self, verdict: Outcome, why: str) -> None:
        self._found.verdict, self._found.why = verdict, why


def stamp(config: Config, verdict: Verdict) -> dict[str, Any]:
    """What `Task.validated` says of a task that is ok: where, with which code of the handler, how long, when."""
    return {
        "line": config.line.name,
        "handler": handlers.digest_of(verdict.handler, handlers_path(config)),
        "seconds": round(verdict.seconds, 3),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
