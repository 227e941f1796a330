"""The policy as Redis knows it: servers (backends) under leases, the weights' version, who pauses it, the load.

A RUN worker exchanges with it once a second (`exchange`); trainer, `rollout serve` and the command line write to it.
A backend's `version` is None while its weights move: a process that dies in between leaves it unusable, not wrong.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pipeline.config import TRAINED, Config
from pipeline.errors import ConfigError
from pipeline.leases import sendable, text_of
from pipeline.policy_verbs import PolicyVerbs
from pipeline.queue import Queue

KINDS = ("vllm", "openai", "nemo-rl")
ENDPOINTS = {"openai": "completions", "nemo-rl": "chat"}
"""By kind, the one that it has; of a vLLM it is found out."""

UNLABELLED = ("completions", "chat")
"""Endpoints whose replies do not say which weights sampled them."""

SHARE_SECONDS = 5.0
"""For so long a worker's share of the load counts after its last exchange; it exchanges every second."""

SEEN_SECONDS = 2.0
"""After so long every RUN worker has seen a change of the registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One policy server.

    `kind`: "vllm" (token interface and control side), "openai" (`/v1/completions` with token ids, no control side) or
    "nemo-rl" (chat completions that take a prefix of ids, see pipeline.chat; no control side). `model`: the name under
    which it serves; "" = policy.model. `tokenizer`: its folder, "" unknown. `endpoint`: "generate", "completions",
    "chat", or "" before anybody asked. `window`: tokens of prompt and completion, 0 unknown.
    `version`: of its weights; None where nobody knows, or while they move. `owner`: who keeps its lease. `why`: for
    people, why it gets no calls. `ends`: Unix time of its lease's end, inf without a lease.
    """

    id: str
    url: str
    kind: str = "vllm"
    model: str = ""
    tokenizer: str = ""
    endpoint: str = ""
    window: int = 0
    version: int | None = None
    drained: bool = False
    owner: str = ""
    why: str = ""
    ends: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What the trainer has said of the policy.

    `version`: of the weights in force; None: no trainer has said any ("unmanaged"). `ordinal`: how many updates there
    were since the line began, `updates`: since this run started or resumed. `path`: folder of the weights in force, ""
    where the trainer moves them itself. `paused`: why no call goes out, "" when they do; `mode`: keep, wait or abort;
    `target`: the version on its way. `batch`, `max_staleness`, `lane`: the bound on new rollouts (batch 0: none);
    `popped`: scored rollouts that were acked since the run started; `dropped`: those that were too stale. `pauses`: the
    number of the newest pause: each new one raises it. `pause_until`: end of the pause's lease (server ms), 0 without.
    `run_owner`: the client that started the run; "" when it is over.
    """

    version: int | None = None
    ordinal: int = 0
    updates: int = 0
    path: str = ""
    paused: str = ""
    mode: str = ""
    target: int | None = None
    pause_owner: str = ""
    batch: int = 0
    max_staleness: int = -1
    lane: str = ""
    popped: int = 0
    dropped: int = 0
    pauses: int = 0
    pause_until: int = 0
    run_owner: str = ""

    @property
    def bound(self) -> int | None:
        """Most rollouts of `lane` that may be begun and not acked; None: no bound."""
        if self.batch < 1 or self.max_staleness < 0:
            return None
        return (self.max_staleness + self.updates + 1) * self.batch - self.popped


def state_of(backend: Backend, policy: PolicyState) -> tuple[str, str]:
    """ready, behind, paused, drained or down, and why; calls go to what is ready."""
    if backend.drained:
        return "drained", "it takes no new calls (`rollout policy drain --off` ends that)"
    behind = policy.version is not None and backend.version != policy.version
    if backend.why:
        return "behind" if behind else "down", backend.why
    if policy.paused:
        return "paused", policy.paused
    if behind:
        has = "weights of an unknown version" if backend.version is None else f"version {backend.version}"
        return "behind", f"it has {has}, version {policy.version} is in force"
    return "ready", ""


class Load(NamedTuple):
    """What runs on one backend: tokens of work in flight, calls, and measured tokens of work per second (0 unknown)."""

    tokens: float = 0.0
    calls: int = 0
    rate: float = 0.0

    def __add__(self, other: object) -> Load:  # sums over workers
        if not isinstance(other, Load):
            return NotImplemented
        return Load(self.tokens + other.tokens, self.calls + other.calls, self.rate + other.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One look. `loads`: of the other workers, summed by backend id; `seen`: the newest pause (`PolicyState.pauses`)
    that each of these workers knows of; `now`: the server's Unix time."""

    policy: PolicyState = PolicyState()
    backends: tuple[Backend, ...] = ()
    loads: Mapping[str, Load] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0

    @property
    def workers(self) -> tuple[str, ...]:
        """RUN workers whose share holds."""
        return tuple(self.seen)


def backend_id(url: str) -> str:
    """The short name of a server where nobody gives one: host and port. Raises ConfigError for what is no URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no URL of a policy server: wanted http://host:port")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a policy server: {error}") from None
    return f"{parts.hostname}:{port or (443 if parts.scheme == 'https' else 80)}"


class Backends(PolicyVerbs):
    """The verbs: a worker's exchange and the list of servers here, pause and run in PolicyVerbs.

    Each raises RedisUnavailable when Redis stays away for longer than the queue's patience.
    """

    def __init__(self, queue: Queue, policy: str = TRAINED) -> None:
        """`policy`: whose servers these are; but for the trained one, the keys stand under a prefix of its own."""
        super().__init__(queue)
        if policy != TRAINED:
            self._queue = copy.copy(queue)
            self._queue.prefix = queue.key("other", policy)

    @property
    def config(self) -> Config:
        return self._queue.config

    async def exchange(self, worker: str, loads: Mapping[str, Load], seen: int = 0) -> View:
        """A worker's share goes in, the view of everything else comes back.

        `seen`: `policy.pauses` of the view that the worker acts upon by now; an update waits until all know its pause.
        """
        share = json.dumps({id: [round(load.tokens), load.calls, round(load.rate, 3)] for id, load in loads.items()})
        return _view(await self._queue.verb("pool", worker, share, int(SHARE_SECONDS * 1000), seen))

    async def leave(self, worker: str) -> None:
        """Take a worker's share away: it ends."""
        await self._queue.verb("pool", worker, "", 0, 0)

    async def view(self) -> View:
        """A look without a share; `loads` are all workers'."""
        return _view(await self._queue.verb("pool", "", "", 0, 0))

    async def add(self, backend: Backend, life: float = 0.0) -> None:
        """Register it, under a lease of `life` seconds that its owner renews; 0: it stays until `remove`.

        Raises ConfigError for a wrong URL or kind, for an id that somebody else has registered (under a lease that
        runs, or by hand), and for a server that is there under another id.
        """
        backend_id(backend.url)
        backend = replace(backend, url=backend.url.rstrip("/"))
        if backend.kind not in KINDS:
            raise ConfigError(f"kind {backend.kind!r} of backend {backend.id} is unknown (known: {', '.join(KINDS)})")
        flat = _flat({name: getattr(backend, name) for name in _WRITTEN})
        status, owner = await self._queue.verb(
            "backend_put", backend.id, backend.owner, int(life * 1000) if life else "", *flat
        )
        if status == b"TWICE":
            raise ConfigError(
                f"server {backend.url} is registered already, as {text_of(owner)}: use that id, or end it"
            )
        if status == b"TAKEN":
            by = text_of(owner)
            how = (
                f"by {by}, which keeps its lease: end that one" if by else "by hand: `rollout policy rm` strikes it off"
            )
            raise ConfigError(f"backend {backend.id} is registered already, {how}, or give another id")

    async def renew(self, id: str, owner: str, life: float) -> bool:
        """Renew its lease; False when it is not registered by this owner any more."""
        return bool(await self._queue.verb("backend_keep", id, owner, int(life * 1000)))

    async def remove(self, id: str, owner: str = "") -> bool:
        """Strike it off; with an owner, only where it is that one's. False when there was none."""
        return bool(await self._queue.verb("backend_drop", id, owner))

    async def note(self, id: str, **about: Any) -> bool:
        """Write fields of a registered backend (version, why, drained, endpoint, window…); False when it is gone."""
        unknown = sorted(about.keys() - set(_WRITTEN))
        if unknown:
            raise TypeError(f"a backend has no field {unknown[0]!r}")
        return bool(await self._queue.verb("backend_note", id, *_flat(about)))

    async def raising(self, id: str, who: str, seconds: float) -> bool:
        """Be the one who changes a backend's weights, for so long; False when another one is at it."""
        return bool(await self._queue.verb("backend_raise", id, who, int(seconds * 1000), ""))

    async def still_raising(self, id: str, who: str, seconds: float) -> bool:
        """Stay it; False when that has run out: another one may have changed them since."""
        return bool(await self._queue.verb("backend_raise", id, who, int(seconds * 1000), "keep"))

    async def raised(self, id: str, who: str) -> None:
        """It is done, or given up: another may try."""
        await self._queue.verb("backend_raise", id, who, 0, "")


_WRITTEN = tuple(item.name for item in fields(Backend) if item.name not in ("id", "owner", "ends"))


def _flat(about: Mapping[str, Any]) -> list[str]:
    """Fields as Redis keeps them: None is "", a bool 1 or 0."""
    flat: list[str] = []
    for name, value in about.items():
        text = "" if value is None else str(int(value)) if isinstance(value, bool | int) else sendable(str(value))
        flat += [name, text]
    return flat


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    return {text_of(flat[i]): text_of(flat[i + 1]) for i in range(0, len(flat), 2)}


def _typed(kind: type, found: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a dataclass among `found`, each of its type; "" of a number keeps the default."""
    read: dict[str, Any] = {}
    for item in fields(kind):
        text = found.get(item.name)
        if text is None or (text == "" and item.type != "str"):
            continue
        read[item.name] = text == "1" if item.type == "bool" else int(text) if "int" in str(item.type) else text
    return read


def _view(reply: Sequence[Any]) -> View:
    now, policy, backends, shares = reply
    listed = []
    for id, ends, flat in backends:
        about = _typed(Backend, _texts(flat))
        listed.append(Backend(**{**about, "id": text_of(id), "url": about.get("url", ""), "ends": float(ends) / 1000}))
    return View(
        policy=PolicyState(**_typed(PolicyState, _texts(policy))),
        backends=tuple(listed),
        loads=_summed(json.loads(share) for share in shares[2::3]),
        seen={text_of(name): int(seen) for name, seen in zip(shares[::3], shares[1::3], strict=True)},
        now=int(now) / 1000,
    )


def _summed(shares: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, Load]:
    """Shares of several workers, added up by backend."""
    total: dict[str, Load] = {}
    for share in shares:
        for id, (tokens, calls, rate) in share.items():
            total[id] = total.get(id, Load()) + Load(tokens, int(calls), rate)
    return total
