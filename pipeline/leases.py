"""What the queue's verbs take and give: claims, popped leases, failures; and how the scripts' replies are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """One lease: what a worker needs to begin."""

    id: str
    token: str
    attempt: int
    losses: int
    alone: bool
    envelope: bytes
    payload_token: str
    payload: bytes
    waited: float
    worked: float
    task: bytes
    place: str = ""
    """The lane whose place it takes; empty where none was asked for."""


class Places(NamedTuple):
    """Free places of a sandbox host: in all, and how many each lane may take of them (a lane not named: all)."""

    free: int
    by_lane: Mapping[str, int]


NO_PLACES = Places(0, {})


class Popped(NamedTuple):
    """One finished rollout in a consumer's hands."""

    id: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """What a tick did."""

    expired: int
    failed: int
    promoted: int
    blind: bool
    over: int
    schema: int


class Beaten(NamedTuple):
    """What a beat was told: the line's schema (0: it has none); of each lease 1 (held), 0 (lost), a cancel's reason."""

    schema: int
    held: list[str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How an attempt ended without a result.

    `mode`: attempt (counts against retry.attempts), loss (against retry.losses), fatal (ends the rollout), back (given
    back; counts nothing). `delay` seconds until it may be claimed again. `to`: "init" where the sandbox is gone,
    "place" where INIT found that it needs one.
    """

    mode: str
    kind: str
    why: str
    delay: float = 0.0
    to: str = ""
    log: str = ""
    host: str = ""
    exit_code: str = ""


def read_beat(reply: Sequence[Any]) -> Beaten:
    schema, *held = reply
    return Beaten(int(schema), [item if isinstance(item, int) else text_of(item) for item in held])


def read_tick(reply: Sequence[Any]) -> Ticked:
    expired, failed, promoted, blind, over, schema = map(int, reply)
    return Ticked(
        expired=expired, failed=failed, promoted=promoted, blind=bool(blind), over=over, schema=schema
    )  # fmt: skip


def read_claim(row: Sequence[Any]) -> Claim:
    id, token, attempt, losses, alone, envelope, payload_token, payload, waited, worked, task, place = row
    return Claim(
        text_of(id), text_of(token), int(attempt), int(losses), alone == b"1", bytes(envelope), text_of(payload_token),
        bytes(payload), int(waited) / 1000, int(worked) / 1000, bytes(task), text_of(place),
    )  # fmt: skip


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def sendable(text: str) -> str:
    """Text that UTF-8 can carry: a lone surrogate (of a file name that is no UTF-8) becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()
