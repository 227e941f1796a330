"""What the model saw and said, as tokens: sequences of turns. `pipeline.builder` grows them.

Inside one sequence every model call's prompt is exactly the tokens already there, so it is stored once. A new sequence
begins only where the history must be rendered anew. A broken invariant is a `TrajectoryError`, never a truncation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import EnvelopeError, TrajectoryError

TurnKind = Literal["prompt", "action", "observation"]
KINDS: tuple[str, ...] = ("prompt", "action", "observation")


class VersionRun(NamedTuple):
    """Tokens `start:end` of a sequence were sampled by weights `version` (a rising integer)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One border-to-border stretch of a sequence.

    `kind`: prompt, action (sampled by the policy) or observation (everything else after the first action).
    `start`, `end`: token positions in the sequence. `started` is Unix time (seconds), `seconds` its duration.
    `finish_reason` and `sampling` belong to actions; `reward` is optional.
    """

    kind: TurnKind
    start: int
    end: int
    finish_reason: str | None = None
    started: float = 0.0
    seconds: float = 0.0
    sampling: dict[str, Any] | None = None
    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PerToken:
    """A further per-token array: `values` is flat, one `shape`-shaped item per token of the sequence."""

    values: npt.NDArray[Any]
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Tokens that the policy saw in one piece.

    `token_ids`: uint32 [T]. `loss_mask`: uint8 [T], 1 only where the policy sampled. `logprobs`: float32 [T], of the
    sampled token, 0.0 where it was not sampled. `versions`: runs over the sampled tokens. `turns`: borders, gapless.
    """

    token_ids: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[VersionRun, ...] = ()
    turns: tuple[Turn, ...] = ()
    per_token: dict[str, PerToken] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self) -> None:
        """Raise TrajectoryError unless lengths, mask, logprobs, turns and version runs fit together."""
        size = len(self.token_ids)
        for name in ("loss_mask", "logprobs"):
            if len(getattr(self, name)) != size:
                raise TrajectoryError(f"{name} has {len(getattr(self, name))} entries for {size} token ids")
        if not bool(np.isfinite(self.logprobs).all()):
            raise TrajectoryError(f"logprob {_first(~np.isfinite(self.logprobs))} of {size} is not finite")
        sampled = self._sampled_by_turns(size)
        if not np.array_equal(sampled, self.loss_mask):
            if int(self.loss_mask.max()) > 1:
                raise TrajectoryError(f"loss_mask entry {_first(self.loss_mask > 1)} is neither 0 nor 1")
            where = _first(sampled != self.loss_mask)
            raise TrajectoryError(f"token {where} has mask {int(self.loss_mask[where])} but the turns say otherwise")
        if bool(np.logical_and(self.logprobs, ~sampled).any()):
            raise TrajectoryError("a token that was not sampled has a logprob other than 0.0")
        self._check_versions(sampled)
        for name, values in self.per_token.items():
            if len(values.values) != size * values.width:
                raise TrajectoryError(
                    f"{name} has {len(values.values)} values for {size} tokens of shape {values.shape}"
                )

    def _sampled_by_turns(self, size: int) -> npt.NDArray[np.bool_]:
        sampled = np.zeros(size, dtype=bool)
        at = 0
        for turn in self.turns:
            if turn.kind not in KINDS:
                raise TrajectoryError(f"turn kind {turn.kind!r} is unknown (known: {', '.join(KINDS)})")
            if turn.start != at or turn.end < turn.start:
                raise TrajectoryError(f"a turn covers {turn.start}:{turn.end} but the one before it ends at {at}")
            if turn.kind == "action":
                sampled[turn.start : turn.end] = True
            at = turn.end
        if at != size:
            raise TrajectoryError(f"the turns end at {at}, the sequence at {size}")
        return sampled

    def _check_versions(self, sampled: npt.NDArray[np.bool_]) -> None:
        covered = np.zeros(len(sampled), dtype=bool)
        at = 0
        for run in self.versions:
            if run.start < at or run.end <= run.start or run.end > len(sampled):
                raise TrajectoryError(f"version run {run.version} covers {run.start}:{run.end} out of order or bounds")
            covered[run.start : run.end] = True
            at = run.end
        if not np.array_equal(covered, sampled):
            raise TrajectoryError(
                f"token {_first(covered != sampled)}: version runs must cover the sampled tokens exactly"
            )

    def to_wire(self) -> dict[str, Any]:
        return {
            **self.extra,
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "versions": [list(run) for run in self.versions],
            "turns": [_turn_to_wire(turn) for turn in self.turns],
            "per_token": {name: [item.values, list(item.shape)] for name, item in self.per_token.items()},
        }

    @classmethod
    def from_wire(cls, wire: Any) -> Sequence:
        """The checked sequence of `to_wire`'s map. Raises EnvelopeError (TrajectoryError for broken invariants)."""
        known = {item.name for item in fields(cls)} - {"extra"}
        if not isinstance(wire, dict):
            raise TrajectoryError(f"this is no sequence: a {type(wire).__name__}")
        try:
            sequence = cls(
                token_ids=_array(wire["token_ids"], np.uint32),
                loss_mask=_array(wire["loss_mask"], np.uint8),
                logprobs=_array(wire["logprobs"], np.float32),
                versions=tuple(VersionRun(*map(_integer, run)) for run in wire["versions"]),
                turns=tuple(_turn_from_wire(turn) for turn in wire["turns"]),
                per_token={
                    str(name): PerToken(_array(values, None), tuple(map(_integer, shape)))
                    for name, (values, shape) in wire["per_token"].items()
                },
                extra={key: value for key, value in wire.items() if key not in known},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TrajectoryError(f"this is no sequence: {type(error).__name__} {error}") from error
        sequence.check()
        return sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The sequences of one rollout, in order; `extra` keeps fields that this version does not know."""

    sequences: tuple[Sequence, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    @property
    def turns(self) -> int:
        """How many actions the policy took."""
        return sum(turn.kind == "action" for sequence in self.sequences for turn in sequence.turns)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest version of the weights that sampled a token; None when nothing was sampled."""
        versions = [run.version for sequence in self.sequences for run in sequence.versions]
        return (min(versions), max(versions)) if versions else None

    def to_wire(self) -> dict[str, Any]:
        return {**self.extra, "sequences": [sequence.to_wire() for sequence in self.sequences]}

    @classmethod
    def from_wire(cls, wire: Any) -> Trajectory:
        if not isinstance(wire, dict) or not isinstance(wire.get("sequences"), list):
            raise TrajectoryError(f"this is no trajectory: a {type(wire).__name__} without a list of sequences")
        extra = {key: value for key, value in wire.items() if key != "sequences"}
        return cls(sequences=tuple(Sequence.from_wire(item) for item in wire["sequences"]), extra=extra)


def _first(where: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(where))


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def _array(value: Any, dtype: type[np.generic] | None) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray) or (dtype is not None and value.dtype != np.dtype(dtype)):
        raise EnvelopeError(f"expected a {np.dtype(dtype) if dtype else ''} array, found {_describe(value)}")
    return value


def _describe(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


_TURN_FIELDS = tuple(item.name for item in fields(Turn) if item.name != "extra")
_TURN_DEFAULTS = {item.name: item.default for item in fields(Turn)}


def _turn_to_wire(turn: Turn) -> dict[str, Any]:
    """Fields at their default are left out, so that a turn stays small."""
    named = {name: getattr(turn, name) for name in _TURN_FIELDS}
    return {**turn.extra, **{name: value for name, value in named.items() if value != _TURN_DEFAULTS[name]}}


_TURN_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,), "start": (int,), "end": (int,), "finish_reason": (str, type(None)), "started": (int, float),
    "seconds": (int, float), "sampling": (dict, type(None)), "reward": (int, float, type(None)),
}  # fmt: skip


def _turn_from_wire(wire: Any) -> Turn:
    """One pass over the map, and no copy of it where every field is known: a batch has ten thousand turns."""
    if not isinstance(wire, dict):
        raise TypeError(f"a turn is a {type(wire).__name__}")
    for name, value in wire.items():
        if not isinstance(value, _TURN_TYPES.get(name, object)):
            raise TypeError(f"a turn's {name} is {value!r:.80}")
    _integer(wire["start"])
    _integer(wire["end"])
    if wire.keys() <= _TURN_TYPES.keys():
        return Turn(**wire)
    named = {name: value for name, value in wire.items() if name in _TURN_TYPES}
    return Turn(**named, extra={name: value for name, value in wire.items() if name not in _TURN_TYPES})
