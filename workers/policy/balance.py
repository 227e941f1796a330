"""Which server takes a call, and how fast a server is: pure arithmetic, without a clock or a socket of its own.

The unit is the token of work: a sampled token counts 1, a prompt token that the server has not cached PROMPT_WEIGHT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PROMPT_WEIGHT = 0.1
"""Prefill works on all prompt tokens at once: one costs about a tenth of a sampled token."""

STICKY = 2.0
"""A rollout stays with its server, which has its prefix, while its expected wait is within this of the best one's."""

FIRST_GUESS = 256.0
"""Sampled tokens of a call, as long as no reply was seen."""

MEMORY = 64
"""Replies over which the mean length, and a server's rate, are taken."""

FORGETTING = 1.02
"""A server's best pace grows by this with each reply that was slower: it may have become a slower one."""

FADE = 2.0
"""Seconds without a call in which what is known of a slow server counts half: it is tried again now and then."""

SPARE, UNHURRIED = 2.0, 1.5
"""A server whose newest replies took at most UNHURRIED times its best pace has room: it can do SPARE times as much."""

SLOWEST = 1e-3
"""Tokens of work per second below which all servers are alike."""


class Offer(NamedTuple):
    """A server that could take the call. `tokens`: of work in flight, all workers'; `rate`: per second, 0 unknown.

    `ceiling`: what its silence still allows that rate to be. `pace`: seconds for a sampled token where nothing waits.
    `doubt`: from 1, how many times better it may have become since it was last asked.
    """

    id: str
    tokens: float
    rate: float
    ceiling: float = math.inf
    pace: float = 0.0
    doubt: float = 1.0


def choose(offers: Sequence[Offer], *, prompt: int, expected: float, sticky: str = "", cached: int = 0) -> str:
    """The id of the server that takes a call of `prompt` tokens whose reply is `expected` long.

    `sticky`: the server that has `cached` of these tokens. The expected wait is all work in flight there, this call's
    included, over the server's rate (where that is unknown, over the best known one), and never less than the reply
    takes on an idle server. Ties go to the first.
    """
    best_known = max((offer.rate for offer in offers), default=0.0) or 1.0

    def wait(offer: Offer) -> float:
        fresh = prompt - cached if offer.id == sticky else prompt
        rate = min(offer.rate * offer.doubt, best_known) if offer.rate else best_known
        rate = max(min(rate, offer.ceiling), SLOWEST)
        return max((offer.tokens + work(fresh, expected)) / rate, expected * offer.pace / offer.doubt)

    best = min(offers, key=wait)
    known = next((offer for offer in offers if offer.id == sticky), None)
    return known.id if known is not None and wait(known) <= STICKY * wait(best) else best.id


def work(fresh: float, sampled: float) -> float:
    """Tokens of work of a call with so many prompt tokens that are not cached, and so many sampled ones."""
    return PROMPT_WEIGHT * max(fresh, 0) + sampled


class Lengths:
    """How long replies are: the mean of the newest ones."""

    def __init__(self) -> None:
        self._seen = 0
        self._mean = FIRST_GUESS

    def add(self, count: int) -> None:
        self._seen = min(self._seen + 1, MEMORY)
        self._mean += (count - self._mean) / self._seen

    @property
    def mean(self) -> float:
        return self._mean


class Mark(NamedTuple):
    """A call's own work, as it began: prompt tokens that were not cached, and tokens that may be sampled at most."""

    fresh: int
    budget: int
    at: float


@dataclass(slots=True)
class Share:
    """What one worker has on one server: calls in flight, and the rate at which they end.

    `heard`: since when the server is silent: its last reply, or the first call after it had none. `pace`: the fewest
    seconds for a sampled token in a while. Work in flight is counted with the mean length as it is known now, so that a
    first guess is soon forgotten.
    """

    calls: int = 0
    prompt: float = 0.0
    allowed: float = 0.0
    heard: float = 0.0
    pace: float = 0.0
    _newest: float = 0.0
    _took: float = 0.0
    _done: float = 0.0
    _busy: float = 0.0
    _since: float = 0.0

    def begin(self, fresh: int, budget: int, now: float) -> Mark:
        """A call goes out."""
        if not self.calls:
            doubt = self.doubt(now)
            self._done, self._busy = self._done / doubt, self._busy / doubt
            self.heard = self._since = now
        self.calls += 1
        self.prompt += PROMPT_WEIGHT * fresh
        self.allowed += budget
        return Mark(fresh, budget, now)

    def end(self, mark: Mark, now: float, sampled: int | None) -> None:
        """It is over, with so many sampled tokens; None: without a reply, which tells nothing of the server's rate."""
        if sampled is not None:
            kept = 1 - 1 / MEMORY
            self._done = self._done * kept + work(mark.fresh, sampled)
            self._busy = self._busy * kept + max(now - self._since, 0.0)
            self._since = self.heard = now
            took = now - mark.at
            self._took += (took - self._took) / MEMORY if self._took else took
            pace = took / max(sampled, 1)
            self.pace = min(pace, self.pace * FORGETTING) if self.pace else pace
            self._newest += (pace - self._newest) / 8 if self._newest else pace
        self.calls -= 1
        self.prompt = self.prompt - PROMPT_WEIGHT * mark.fresh if self.calls else 0.0
        self.allowed -= mark.budget

    def doubt(self, now: float) -> float:
        """How much better it may be than its last replies, after so long without a call. 1 while it has calls.

        A server that was slow once (its first request, a neighbour on its node) would else never get a call again.
        """
        return 1.0 if self.calls or not self._done else 2.0 ** min(max(now - self.heard, 0.0) / FADE, 30.0)

    def pause(self, seconds: float, now: float) -> None:
        """The server stood still for so long by order: that was no silence, and no time that it was busy."""
        self._since += seconds
        self.heard = now

    @property
    def spare(self) -> float:
        """What more it can do than it does: its rate is that of the calls that it had, and with few calls it is low."""
        return SPARE if self._newest <= UNHURRIED * self.pace else 1.0

    @property
    def rate(self) -> float:
        """Tokens of work that were done in a second with calls in flight, over the last replies; 0 before the first.

        In a steady state that is Little's law: the work in the system over the time that a call spends in it. But
        a burst, whose first replies have not waited, does not make a slow server look fast.
        """
        return self._done / max(self._busy, 1e-4) if self._done else 0.0

    def tokens(self, mean: float) -> float:
        """Tokens of work in flight, where a reply is `mean` long."""
        return self.prompt + min(self.calls * mean, self.allowed)

    def ceiling(self, mean: float, now: float) -> float:
        """What its rate can be at most, after a silence longer than a reply takes, with this work in flight."""
        silent = now - self.heard - self._took
        return self.tokens(mean) / silent if self.calls and silent > 0 else math.inf
