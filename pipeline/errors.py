"""Every error of the line, drawn as one tree; the branch decides what happens to the rollout.

    LineError
    ├── Retryable               the attempt failed, the rollout is tried again (up to `retry.attempts`)
    │   ├── SandboxError            the sandbox did not start, broke, or is gone
    │   │   └── SandboxGone             a RUN attempt finds nothing to go on with: back to INIT, a loss
    │   ├── PolicyError             the policy's server did not answer, or answered with a fault of its own
    │   │   └── PolicyReplyError        the reply breaks the contract (counts differ, no logprobs)
    │   ├── GraderError             the grader broke before it could judge
    │   ├── LimitExceeded           a stage's working time is over
    │   │   └── EvaluationTimeout       the tests did not end in time: once more, then as `limits.eval_timeout` says
    │   └── WorkerLost              the process that ran the attempt died, or was told to give it back
    │       └── PayloadFilesAway        a payload file can't be used on this machine
    │           └── PayloadFolderAway   none of them can
    ├── Fatal                   trying again can't help: the rollout ends `failed` at once
    │   ├── TaskError               the task's own data is wrong
    │   ├── OutOfTime               the working time of the whole rollout is over
    │   ├── HandlerError            the handler's code raised
    │   │   └── UnknownHandler          no such handler
    │   ├── EnvelopeError           bytes that are no envelope of ours, or break its invariants
    │   │   └── TrajectoryError         ids, mask, logprobs or turns that do not fit together
    │   └── ConfigError             a setting is wrong
    │       └── TooOld                  the line was raised to messages that this installation does not read
    ├── ContextFull             the policy's window holds no further token: the rollout is scored, marked truncated
    ├── NeedsPlace              INIT found that the rollout needs a sandbox: it waits for a host with room
    ├── Stale                   the lease token is no longer ours: what we hold is worth nothing now
    ├── Cancelled               the trainer (or a person) cancelled the rollout
    └── ServiceError            towards the caller, not about one rollout
        ├── RedisUnavailable        Redis can't be reached, refuses us, or can't be used
        ├── QueueFull               the line holds as much as it may; nothing was written
        ├── MemoryHigh              Redis is above the memory mark; nothing was written
        └── Incomplete              `pop` could not be filled in time (what came is in `.batch`)

A handler raises plain Python errors; the worker's loop decides once, in `classify`, which branch they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class LineError(Exception):
    """Something in the line went wrong."""

    kind: ClassVar[str] = "line"

    def __init__(self, message: str = "") -> None:
        super().__init__(message or (type(self).__doc__ or "").split("\n\n")[0])


class Retryable(LineError):
    """The attempt failed for a reason that another attempt may not meet."""

    kind = "retryable"


class SandboxError(Retryable):
    """The sandbox did not start, broke, or does not answer."""

    kind = "sandbox"


class SandboxGone(SandboxError):
    """The sandbox that this rollout should go on in does not exist any more."""


class PolicyError(Retryable):
    """The policy's server did not answer, or answered with a fault of its own."""

    kind = "policy"


class PolicyReplyError(PolicyError):
    """The policy's reply breaks the contract: ids, logprobs and counts do not fit together."""


class GraderError(Retryable):
    """The grader broke before it could judge."""

    kind = "grader"


class LimitExceeded(Retryable):
    """The stage's working time is over."""

    kind = "limit"


class EvaluationTimeout(LimitExceeded):
    """The tests of an evaluation did not end in time. `evidence` says what had run.

    A handler's `eval` raises it. The evaluation is done once more; a second time-out is recorded: as 0.0 with this
    evidence where `limits.eval_timeout` is `zero` and the task's gold was validated on this line, else as `failed`.
    """

    def __init__(self, message: str = "", evidence: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.evidence = dict(evidence or {})


class WorkerLost(Retryable):
    """The process that ran this attempt died or gave it back."""

    kind = "worker"


class PayloadFilesAway(WorkerLost):
    """A payload lies in a file that this machine can't read or write now (payload.dir)."""


class PayloadFolderAway(PayloadFilesAway):
    """None of the line's payload files is within this machine's reach: that says nothing of any rollout."""


class Fatal(LineError):
    """Trying again can't help."""

    kind = "fatal"


class TaskError(Fatal):
    """The task's own data is wrong."""

    kind = "task"


class OutOfTime(Fatal):
    """The working time of the whole rollout is over."""

    kind = "limit"


class HandlerError(Fatal):
    """The handler's code raised."""

    kind = "handler"


class UnknownHandler(HandlerError):
    """No handler of this name is known."""


class EnvelopeError(Fatal):
    """These bytes are no envelope of this line. `size` is their length; `raw` is kept for the dead letters."""

    kind = "envelope"

    def __init__(self, message: str = "", raw: bytes = b"") -> None:
        super().__init__(message)
        self.raw = raw
        self.size = len(raw)


class TrajectoryError(EnvelopeError):
    """Ids, mask, logprobs or turns of a trajectory do not fit together."""

    kind = "trajectory"


class ConfigError(Fatal):
    """A setting is wrong."""

    kind = "config"


class TooOld(ConfigError):
    """The line's schema is above what this installation reads: it takes nothing more. Upgrade it."""


class ContextFull(LineError):
    """The policy's window holds no further token. No failure: the rollout is scored and marked truncated."""

    kind = "context"


class NeedsPlace(LineError):
    """The rollout needs a sandbox: it waits for a host with room. No failure, and it counts nothing."""

    kind = "place"


class Stale(LineError):
    """The lease token is no longer current: another attempt, or nobody, owns this rollout now."""

    kind = "stale"


class Cancelled(LineError):
    """The rollout was cancelled."""

    kind = "cancelled"


class ServiceError(LineError):
    """The line can't serve this call."""

    kind = "service"


class RedisUnavailable(ServiceError):
    """Redis can't be reached, refuses us, or can't be used."""

    kind = "redis"


class QueueFull(ServiceError):
    """The line is full; nothing was written. Pop what is done, or wait."""

    kind = "full"


class MemoryHigh(ServiceError):
    """Redis is above the memory mark; nothing was written. Pop what is done, or wait."""

    kind = "memory"


class Incomplete(ServiceError):
    """`pop` could not be filled in time.

    `batch` holds what came (leased; ack it or let it return), `wanted` and `got` count, `missing` maps each
    rollout that is outstanding to a sentence that says where it is and why it waits.
    """

    kind = "incomplete"

    def __init__(self, message: str, *, batch: Any, wanted: int, got: int, missing: dict[str, str]) -> None:
        super().__init__(message)
        self.batch = batch
        self.wanted = wanted
        self.got = got
        self.missing = missing

    def __reduce__(self) -> tuple[Any, ...]:
        """It is pickled whole: rank 0 hands it to the trainer's other processes."""
        about = {"batch": self.batch, "wanted": self.wanted, "got": self.got, "missing": self.missing}
        return partial(Incomplete, **about), (str(self),)


def by_kind(kind: str, message: str) -> LineError | None:
    """The error that a child process names by its kind; None for a kind that decides nothing about a rollout."""
    for branch in (Retryable, Fatal):
        for cls in (branch, *branch.__subclasses__()):
            if cls.kind == kind:
                error: LineError = cls(message)
                return error
    return None
