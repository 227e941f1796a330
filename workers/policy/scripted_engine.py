"""The scripted policy's engine: calls that take time, pause and resume, abort, and weights that change under them.

Engine time stands still while it is paused with `keep`. A token belongs to the version that was current at the engine
time at which it was sampled, as in vLLM's `weight_versions`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.policy.scripted_speech import Speech

MODES = ("abort", "keep", "wait")


@dataclass(eq=False)
class Call:
    """One request on its way. `planned`: ids of the whole reply, already cut to the request's max_tokens."""

    id: str
    prompt_size: int
    planned: list[int]
    logprobs: list[float]
    reason: str
    first: float = 0.0
    aborted: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Outcome:
    """What a call came to. `versions`: (label, start, end) over ids."""

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int, int]]
    reason: str


class Engine:
    """`latency`: seconds before the first token; `per_token`: seconds for each further one."""

    def __init__(self, speech: Speech, *, latency: float = 0.0, per_token: float = 0.0) -> None:
        self.speech = speech
        self.latency, self.per_token = latency, per_token
        self.paused = False
        self.counts: Counter[str] = Counter()
        self.calls: dict[str, Call] = {}
        self._labels: list[tuple[float, str]] = [(0.0, "default")]
        self._began = time.monotonic()
        self._stood_still = 0.0
        self._paused_at = 0.0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._idle = asyncio.Event()

    @property
    def label(self) -> str:
        """The current weights' version, as the trainer named it."""
        return self._labels[-1][1]

    def relabel(self, label: str) -> None:
        self._labels.append((self._now(), label))

    def _now(self) -> float:
        real = self._paused_at if self.paused else time.monotonic()
        return real - self._began - self._stood_still

    async def run(self, call_id: str, ids: npt.NDArray[np.uint32], max_tokens: int, seed: object) -> Outcome:
        """Answer one prompt. A cancelled coroutine (the client closed its socket) counts as aborted."""
        await self._resumed.wait()
        said = self.speech.reply(ids, self.speech.chance(ids, seed))
        cut = len(said.ids) > max_tokens
        planned, logprobs = said.ids[:max_tokens], said.logprobs[:max_tokens]
        call = Call(call_id, len(ids), planned, logprobs, "length" if cut else "stop", self._now() + self.latency)
        self.calls[call_id] = call
        try:
            if self.latency or self.per_token or self.paused:
                await self._until(call, call.first + self.per_token * (len(planned) - 1))
        except asyncio.CancelledError:
            call.aborted = True
            raise
        finally:
            self._leave(call)
        return self._outcome(call)

    async def _until(self, call: Call, when: float) -> None:
        while not call.aborted:
            left = None if self.paused else when - self._now()
            if left is not None and left <= 0:
                return
            call.woken.clear()
            try:
                async with asyncio.timeout(left):
                    await call.woken.wait()
            except TimeoutError:
                continue

    def _leave(self, call: Call) -> None:
        del self.calls[call.id]
        reason = "abort" if call.aborted else call.reason
        self.counts["prompt"] += call.prompt_size
        self.counts["generated"] += self._sampled(call)
        self.counts[f"finished {reason}"] += 1
        if not self.calls:
            self._idle.set()

    def _sampled(self, call: Call) -> int:
        """How many tokens are there by now."""
        if not call.aborted:
            return len(call.planned)
        ready = self._now() - call.first
        if ready < 0:
            return 0
        return min(len(call.planned), 1 + int(ready / self.per_token)) if self.per_token else len(call.planned)

    def _outcome(self, call: Call) -> Outcome:
        count = self._sampled(call)
        spans: list[tuple[str, int, int]] = []
        for at in range(count):
            label = self._label_at(call.first + at * self.per_token)
            if spans and spans[-1][0] == label:
                spans[-1] = (label, spans[-1][1], at + 1)
            else:
                spans.append((label, at, at + 1))
        reason = "abort" if call.aborted else call.reason
        return Outcome(call.planned[:count], call.logprobs[:count], spans, reason)

    def _label_at(self, when: float) -> str:
        return next(label for since, label in reversed(self._labels) if since <= max(when, 0.0))

    async def pause(self, mode: str) -> None:
        """`keep` freezes what runs, `abort` ends it with what it has, `wait` lets it finish; new calls are held."""
        self._resumed.clear()
        if mode == "wait":
            while self.calls:
                self._idle.clear()
                await self._idle.wait()
        if mode == "abort":
            self.abort(list(self.calls))
        if not self.paused:
            self._paused_at = time.monotonic()
            self.paused = True
        self._wake()

    def resume(self) -> None:
        if self.paused:
            self._stood_still += time.monotonic() - self._paused_at
            self.paused = False
        self._resumed.set()
        self._wake()

    def abort(self, ids: list[str]) -> None:
        """End these calls (`generate-tokens-…` ids); unknown ones are passed over, as vLLM does."""
        for call_id in ids:
            call = self.calls.get(call_id)
            if call:
                call.aborted = True
                call.woken.set()

    def _wake(self) -> None:
        for call in self.calls.values():
            call.woken.set()
