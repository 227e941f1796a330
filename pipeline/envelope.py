"""The messages of the line: a task (what the trainer asks for), an envelope (one sample on its way), its payload,
and the rollout that the trainer pops.

Frozen dataclasses that travel as msgpack maps; unknown fields survive a round trip; every corruption is an
`EnvelopeError`. The envelope is under 1 KB and rides in the rollout's hash; the payload is a key of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from pipeline import wire
from pipeline.errors import EnvelopeError, TaskError
from pipeline.trajectory import Trajectory

SCHEMA = 2
"""The newest message format that this version writes. 2: a payload or a task may lie in a file (payload_files.py)."""

OLDEST_SCHEMA = 1
"""The oldest one that it reads, and writes on a line of that number: the line's own number counts (queue_calls.py).

The maps are the same in 1 and 2, but for the number. A message of any other number is a stray: an EnvelopeError.
"""


READS = str(SCHEMA) if OLDEST_SCHEMA == SCHEMA else f"{OLDEST_SCHEMA} to {SCHEMA}"
"""The schemas that this version reads, for sentences."""


class Stage(StrEnum):
    """The stations of the line, in order."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    DONE = "done"


NEXT = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL, Stage.EVAL: Stage.DONE}
"""Where a commit of a stage leads."""

WORKING = (Stage.INIT, Stage.RUN, Stage.EVAL)

Message = TypeVar("Message", bound="Task | Envelope | Payload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the trainer asks for; shared by all samples of its group.

    `handler`: name or "module:Class". `data`: the instance, checked by the handler's own model. `sampling`: overrides
    of the policy's settings (temperature, top_p, max_tokens, seed …). `limits`: overrides in seconds or counts
    (init, run, eval, total, max_turns). `policy`: which policy plays. `deadline`: Unix time (seconds) after which
    nobody wants it. `validated`: what `rollout task validate` found (line, handler's digest, seconds); {} = never done.
    `id` names the group; the same id enqueued twice is one group.
    """

    handler: str
    data: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    policy: str = "policy"
    deadline: float | None = None
    validated: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One sample of a task on its way through the line.

    `sample` of `samples` in its `group`. `sandbox`: the driver's reference, set by INIT. `enqueued`: Unix time.
    `retry_of`: the id of the failed rollout that this one repeats.
    """

    id: str
    group: str
    handler: str
    sample: int = 0
    samples: int = 1
    lane: str = "train"
    priority: int = 0
    policy: str = "policy"
    sandbox: dict[str, Any] | None = None
    enqueued: float = 0.0
    deadline: float | None = None
    retry_of: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def advance(self, **changes: Any) -> Envelope:
        """A copy with these fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a stage hands to the next beside the envelope: the handler's own small `state`, and the trajectory."""

    state: dict[str, Any] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    truncated: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


_TYPES: dict[str, tuple[type, ...]] = {
    "handler": (str,), "id": (str,), "group": (str,), "lane": (str,), "policy": (str,), "sample": (int,),
    "samples": (int,), "priority": (int,), "enqueued": (int, float), "data": (dict,), "sampling": (dict,),
    "limits": (dict,), "state": (dict,), "validated": (dict,),
    "deadline": (int, float, type(None)), "sandbox": (dict, type(None)), "retry_of": (str, type(None)),
    "truncated": (str, type(None)), "trajectory": (dict, type(None)),
}  # fmt: skip


def to_map(message: Task | Envelope | Payload, schema: int) -> dict[str, Any]:
    """The msgpack map of a message. `schema`: the number of the line that it goes to (`Queue.schema`)."""
    named = {item.name: getattr(message, item.name) for item in fields(message) if item.name != "extra"}
    if isinstance(message, Payload) and message.trajectory is not None:
        named["trajectory"] = message.trajectory.to_wire()
    return {**message.extra, **named, "schema": schema}


def from_map(cls: type[Message], value: Any, raw: bytes = b"") -> Message:
    """The message of `to_map`'s map. Raises EnvelopeError on an unknown schema, missing fields and wrong types."""
    name = cls.__name__
    if not isinstance(value, dict):
        raise EnvelopeError(f"expected a {name}, found a {type(value).__name__}", raw)
    schema = value.get("schema")
    if type(schema) is not int or not OLDEST_SCHEMA <= schema <= SCHEMA:
        raise EnvelopeError(f"{name} of schema {schema!r:.80}: this version reads {READS}", raw)
    known = {item.name for item in fields(cls)} - {"extra"}
    named = {key: item for key, item in value.items() if key in known}
    for key, item in named.items():
        allowed = (str, type(None)) if (cls is Task and key == "id") else _TYPES.get(key)
        if allowed and (not isinstance(item, allowed) or (isinstance(item, bool) and bool not in allowed)):
            raise EnvelopeError(f"{name}.{key} is {item!r:.80}, a {type(item).__name__}", raw)
    if isinstance(named.get("trajectory"), dict):
        named["trajectory"] = Trajectory.from_wire(named["trajectory"])
    extra = {key: item for key, item in value.items() if key not in known and key != "schema"}
    try:
        return cls(**named, extra=extra)
    except TypeError as error:
        raise EnvelopeError(f"this is no {name}: {error}", raw) from error


def encode(message: Task | Envelope | Payload, schema: int) -> bytes:
    """Plain msgpack bytes: for the envelope, which is small. `schema`: the line's (`Queue.schema`)."""
    return wire.pack(to_map(message, schema))


def decode(cls: type[Message], data: bytes) -> Message:
    """Raises EnvelopeError for bytes that `encode` did not make."""
    return from_map(cls, wire.unpack(data), data)


def encode_compressed(message: Task | Envelope | Payload, schema: int, level: int = 1) -> bytes:
    """zstd over msgpack: for tasks and payloads. `schema`: the line's (`Queue.schema`)."""
    return wire.compress(to_map(message, schema), level)


def decode_compressed(cls: type[Message], data: bytes) -> Message:
    """Raises EnvelopeError for bytes that `encode_compressed` did not make."""
    return from_map(cls, wire.expand(data), data)


def check_task(task: Task) -> None:
    """Raise TaskError unless a worker can decode this task: types, limits, an id that can stand in a key."""
    try:
        from_map(Task, wire.unpack(encode(task, SCHEMA)))
    except EnvelopeError as error:
        raise TaskError(str(error)) from None
    for name, value in task.limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise TaskError(
                f"Task.limits[{name!r}] is {value!r:.80}, wanted a number of seconds (or a count), 0 or more"
            )
    if not 0 < len(task.handler) <= 200 or not task.handler.isprintable():
        raise TaskError(f"Task.handler is {task.handler!r:.80}, wanted a name or module:Class, 1 to 200 characters")
    if task.id is not None and (not 0 < len(task.id) <= 200 or not task.id.isprintable()):
        raise TaskError(f"Task.id is {task.id!r:.80}, wanted 1 to 200 printable characters, or None")
    if task.deadline is not None and not math.isfinite(task.deadline):
        raise TaskError(f"Task.deadline is {task.deadline}, wanted Unix time in seconds, or None")


def rollout_id(group: str, sample: int) -> str:
    """The id of sample number `sample` of a group: the same task enqueued twice names the same rollouts."""
    return f"{group}.{sample}"
