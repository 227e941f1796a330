"""What the trainer pops: a rollout's record, with its trajectory as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline import wire
from pipeline.config import TRAINED
from pipeline.envelope import Envelope, Payload, decode, decode_compressed
from pipeline.errors import EnvelopeError
from pipeline.leases import Popped
from pipeline.trajectory import Trajectory

Outcome = Literal["scored", "failed", "cancelled"]

CLOSED = "closed"
"""Kind of a rollout that was cancelled because its group closed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """How a rollout failed: kind, stage, the sentence, the last 4 KB of log, host and exit code where known."""

    kind: str
    stage: str
    why: str
    log: str = ""
    host: str = ""
    exit_code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished rollout. `reward` is None unless `outcome` is "scored": a failure is never a reward.

    `policy`: which one played. `parts`: named parts of the reward. `truncated`: "context", "turns", "length" or None.
    `state`: the handler's own map. `seconds`: enqueued to ended. `worked`: seconds of work over all attempts. `losses`:
    times it was given out again without its own fault. `staleness`: updates of the weights between its oldest sampled
    token and its pop; None where nothing was sampled, or no trainer has named a version. `stale`: that is more than
    max_staleness, or that it is `late`: its group had closed without it. `sampled`: tokens that the policy sampled,
    also of a rollout that was cut and has no trajectory.
    """

    id: str
    group: str
    sample: int
    samples: int
    lane: str
    outcome: Outcome
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict, repr=False)
    truncated: str | None = None
    failure: Failed | None = None
    trajectory: Trajectory | None = field(default=None, repr=False)
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    handler: str = ""
    policy: str = TRAINED
    retry_of: str | None = None
    losses: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    seconds: float = 0.0
    worked: float = 0.0
    staleness: int | None = None
    stale: bool = False
    late: bool = False

    @property
    def sampled(self) -> int:
        if self.trajectory is not None:
            return self.trajectory.sampled
        return next((int(item["tokens"]) for item in reversed(self.attempts) if item.get("tokens")), 0)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of the weights that sampled it; the runs are in `trajectory.sequences`."""
        return self.trajectory.version_range if self.trajectory else None


@dataclass(frozen=True, slots=True)
class Batch(Sequence[Rollout]):
    """Popped rollouts, leased until `ack` (or until they are handed back)."""

    rollouts: tuple[Rollout, ...]
    leases: tuple[Popped, ...]

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, at: Any) -> Any:
        return self.rollouts[at]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __add__(self, other: Batch) -> Batch:
        return Batch(self.rollouts + other.rollouts, self.leases + other.leases)


@dataclass(frozen=True, slots=True)
class Group:
    """All members of one task, whatever their outcome.

    `wanted`: scored members that it should have. `closed`: why it did not wait for all of them, "usable" (enough were
    scored) or "deadline"; empty where it did. A group that closed and let the rest go on comes a second time with that
    rest, `late`.
    """

    id: str
    rollouts: tuple[Rollout, ...]
    wanted: int = 0
    closed: str = ""
    late: bool = False

    @property
    def scored(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.outcome == "scored")

    @property
    def cut(self) -> tuple[Rollout, ...]:
        """Members that were cancelled when the group closed: `seconds`, `worked`, `sampled` say how long they were."""
        return tuple(rollout for rollout in self.rollouts if rollout.failure and rollout.failure.kind == CLOSED)

    @property
    def partial(self) -> bool:
        """Fewer members were scored than it should have."""
        return len(self.scored) < self.wanted

    @property
    def mean(self) -> float | None:
        """Mean reward of the scored members; None when there is none: a failure is no zero."""
        rewards = [rollout.reward for rollout in self.scored if rollout.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


def read(
    popped: Popped,
    fields: dict[str, bytes],
    attempts: list[dict[str, Any]],
    payload: bytes | EnvelopeError | None,
    *,
    inflated: bool = False,
) -> Rollout:
    """A rollout's record from its hash and payload. Bytes that do not decode make it `failed`, kind `envelope`.

    `payload`: its bytes, or why they can't be had. `inflated`: they are decompressed already (`wire.inflate`).
    """

    def text(name: str) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    outcome: Any = text("outcome")
    started, ended = int(text("entered") or 0), int(text("ended") or 0)
    about: dict[str, Any] = {
        "losses": int(text("losses") or 0), "attempts": attempts, "seconds": max(0, ended - started) / 1000,
        "worked": int(text("worked") or 0) / 1000, "late": bool(text("late")),
    }  # fmt: skip
    failure = None
    if text("kind"):
        failure = Failed(
            kind=text("kind"),
            stage=text("at"),
            why=text("why"),
            log=text("log"),
            host=text("host"),
            exit_code=text("exit"),
        )
    try:
        envelope = decode(Envelope, fields.get("env", b""))
        if isinstance(payload, EnvelopeError):
            raise payload
        if payload is None and fields.get("payload"):
            raise EnvelopeError(f"the payload that {text('payload')} committed is not there")
        content = (decode if inflated else decode_compressed)(Payload, payload) if payload else Payload()
        result = wire.unpack(fields["result"]) if outcome == "scored" else {}
        if not isinstance(result, dict):
            raise EnvelopeError(f"its result is a {type(result).__name__}, no map")
    except (EnvelopeError, KeyError) as error:
        failure = failure or Failed(kind="envelope", stage="done", why=f"its record does not decode: {error}")
        group = text("group")
        return Rollout(
            id=popped.id,
            group=group,
            sample=-1,
            samples=-1,
            lane=text("lane"),
            outcome="failed",
            failure=failure,
            **about,
        )
    return Rollout(
        id=popped.id, group=envelope.group, sample=envelope.sample, samples=envelope.samples, lane=envelope.lane,
        outcome=outcome, reward=result.get("reward"), parts=result.get("parts", {}),
        evidence=result.get("evidence", {}),
        truncated=content.truncated, failure=failure, trajectory=content.trajectory, state=content.state,
        handler=envelope.handler, policy=envelope.policy, retry_of=envelope.retry_of, **about,
    )  # fmt: skip
