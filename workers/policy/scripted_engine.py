"""The scripted policy's engine: calls that wait for a slot and take time, pause and resume, abort, new weights, death.

Engine time stands still while it is paused with `keep`, and while it hangs. A token belongs to the version that was
current at the engine time at which it was sampled, as in vLLM's `weight_versions`.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.policy.scripted_faults import DEATH
from workers.policy.scripted_speech import Speech

MODES = ("abort", "keep", "wait")
BLOCK = 128
"""Tokens of a prefix that are cached together."""


class EngineDead(Exception):
    """The engine is gone; the server around it is still there."""

    def __init__(self) -> None:
        super().__init__(DEATH)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """`latency`: seconds before the first token, `per_token`: for each further one, `per_prompt_token`: for each token
    of the prompt that is not cached. `slots`: calls that run at once, 0 = all; the others wait, lowest priority first.
    """

    latency: float = 0.0
    per_token: float = 0.0
    per_prompt_token: float = 0.0
    slots: int = 0


@dataclass(eq=False)
class Call:
    """One request on its way. `planned`: ids of the whole reply, already cut to the request's max_tokens.

    `first`: engine time of its first token, inf while it waits for a slot. `cached`: tokens of its prompt that were.
    """

    id: str
    prompt_size: int
    planned: list[int]
    logprobs: list[float]
    reason: str
    cached: int = 0
    first: float = math.inf
    aborted: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Outcome:
    """What a call came to. `versions`: (label, start, end) over ids. `cached`: tokens of the prompt that were."""

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int, int]]
    reason: str
    cached: int


class Engine:
    """`poison`: a question that kills it. `loaded`: the folders whose weights it was given, the newest last."""

    def __init__(self, speech: Speech, pace: Pace, poison: str = "") -> None:
        self.speech, self.pace, self.poison = speech, pace, poison
        self.paused = self.hangs = self.dead = False
        self.loaded: list[str] = []
        self.counts: Counter[str] = Counter()
        self.calls: dict[str, Call] = {}
        self._waiting: list[tuple[int, int, Call]] = []
        self._running = 0
        self._number = 0
        self._prefixes: set[bytes] = set()
        self._labels: list[tuple[float, str]] = [(0.0, "default")]
        self._began = time.monotonic()
        self._stood_still = 0.0
        self._stopped_at: float | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._idle = asyncio.Event()

    @property
    def label(self) -> str:
        """The current weights' version, as the trainer named it."""
        return self._labels[-1][1]

    @property
    def running(self) -> int:
        """Calls that have a slot; the others wait for one."""
        return self._running

    def relabel(self, label: str) -> None:
        self._labels.append((self._now(), label))

    def _now(self) -> float:
        real = time.monotonic() if self._stopped_at is None else self._stopped_at
        return real - self._began - self._stood_still

    # -- calls -------------------------------------------------------------------------------------------------------

    async def run(
        self,
        call_id: str,
        ids: npt.NDArray[np.uint32],
        max_tokens: int,
        seed: object,
        priority: int = 0,
        stop: Sequence[str] = (),
    ) -> Outcome:
        """Answer one prompt. A cancelled coroutine (the client closed its socket) counts as aborted.

        The token that completes one of the texts in `stop` is the last. Raises EngineDead.
        """
        await self._resumed.wait()
        if self.poison and self.poison == self.speech.question(ids):
            self.die()
        self._living()
        said = self.speech.reply(ids, self.speech.chance(ids, seed))
        most = min(self.speech.until(said.ids, stop), max_tokens)
        reason = "length" if most == max_tokens < len(said.ids) else "stop"
        call = Call(call_id, len(ids), said.ids[:most], said.logprobs[:most], reason)
        self.calls[call_id] = call
        self._number += 1
        heapq.heappush(self._waiting, (priority, self._number, call))
        self._let_in()
        try:
            await self._until_done(call, ids)
        except asyncio.CancelledError:
            call.aborted = True
            raise
        finally:
            self._leave(call)
        self._living()
        return self._outcome(call)

    def _living(self) -> None:
        if self.dead:
            raise EngineDead

    def _let_in(self) -> None:
        """Give free slots to those that wait."""
        while self._waiting and (not self.pace.slots or self._running < self.pace.slots):
            call = heapq.heappop(self._waiting)[2]
            if call.id in self.calls and not call.aborted:
                self._running += 1
                call.first = -math.inf  # its own coroutine says when, once it knows what is cached
                call.woken.set()

    async def _until_done(self, call: Call, ids: npt.NDArray[np.uint32]) -> None:
        while call.first == math.inf and not call.aborted and not self.dead:
            call.woken.clear()
            await call.woken.wait()
        if call.aborted or self.dead:
            return
        call.cached = self._cache(ids)
        call.first = self._now() + self.pace.latency + self.pace.per_prompt_token * (len(ids) - call.cached)
        ends = call.first + self.pace.per_token * (len(call.planned) - 1)
        while not call.aborted and not self.dead:
            left = None if self._stopped_at is not None else ends - self._now()
            if left is not None and left <= 0:
                return
            call.woken.clear()
            try:
                async with asyncio.timeout(left):
                    await call.woken.wait()
            except TimeoutError:
                continue

    def _cache(self, ids: npt.NDArray[np.uint32]) -> int:
        """How many tokens at the front of this prompt were seen before; they are all cached now."""
        digest, known, found = hashlib.blake2b(digest_size=16), 0, True
        for start in range(0, len(ids) - len(ids) % BLOCK, BLOCK):
            digest.update(ids[start : start + BLOCK].tobytes())
            key = digest.digest()
            found = found and key in self._prefixes
            known += BLOCK * found
            self._prefixes.add(key)
        return known

    def reset_cache(self) -> None:
        """Forget every prefix."""
        self._prefixes.clear()

    def _leave(self, call: Call) -> None:
        del self.calls[call.id]
        if call.first != math.inf:
            self._running -= 1
        reason = "abort" if call.aborted else call.reason
        self.counts["prompt"] += call.prompt_size
        self.counts["cached"] += call.cached
        self.counts["generated"] += self._sampled(call)
        self.counts[f"finished {reason}"] += 1
        self._let_in()
        if not self.calls:
            self._idle.set()

    def _sampled(self, call: Call) -> int:
        """How many tokens are there by now."""
        if not call.aborted:
            return len(call.planned)
        ready = self._now() - call.first
        if ready < 0 or math.isinf(call.first):
            return 0
        pace = self.pace.per_token
        return min(len(call.planned), 1 + int(ready / pace)) if pace else len(call.planned)

    def _outcome(self, call: Call) -> Outcome:
        count = self._sampled(call)
        spans: list[tuple[str, int, int]] = []
        for at in range(count):
            label = self._label_at(call.first + at * self.pace.per_token)
            if spans and spans[-1][0] == label:
                spans[-1] = (label, spans[-1][1], at + 1)
            else:
                spans.append((label, at, at + 1))
        reason = "abort" if call.aborted else call.reason
        return Outcome(call.planned[:count], call.logprobs[:count], spans, reason, call.cached)

    def _label_at(self, when: float) -> str:
        return next(label for since, label in reversed(self._labels) if since <= max(when, 0.0))

    # -- control -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """`keep` freezes what runs, `abort` ends it with what it has, `wait` lets it finish; new calls are held."""
        self._resumed.clear()
        if mode == "wait":
            while self.calls:
                self._idle.clear()
                await self._idle.wait()
        if mode == "abort":
            self.abort(list(self.calls))
        self.paused = True
        self._stop_or_go()

    def resume(self) -> None:
        self.paused = False
        self._resumed.set()
        self._stop_or_go()

    def hang(self, yes: bool) -> None:
        """Stand still without a word, as an engine whose output thread has died."""
        self.hangs = yes
        self._stop_or_go()

    def die(self, yes: bool = True) -> None:
        """Every call, those in flight too, raises EngineDead."""
        self.dead = yes
        self._wake()

    def abort(self, ids: list[str]) -> None:
        """End these calls (`generate-tokens-…` ids); unknown ones are passed over, as vLLM does."""
        for call_id in ids:
            call = self.calls.get(call_id)
            if call:
                call.aborted = True
                call.woken.set()

    def _stop_or_go(self) -> None:
        stopped = self.paused or self.hangs
        if stopped and self._stopped_at is None:
            self._stopped_at = time.monotonic()
        elif not stopped and self._stopped_at is not None:
            self._stood_still += time.monotonic() - self._stopped_at
            self._stopped_at = None
        self._wake()

    def _wake(self) -> None:
        for call in self.calls.values():
            call.woken.set()
