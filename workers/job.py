"""One attempt of one stage, as it goes into the work and comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.envelope import Envelope, Payload, Stage, Task
from pipeline.interfaces import Reward

EVALUATIONS = 2
"""An evaluation that is out of time is done so often; more would only take places from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt's input. `place`: INIT may make a sandbox; `made`: reference of the one that is there already.

    `late`: how many evaluations of this very trajectory were out of time before.
    """

    stage: Stage
    id: str
    token: str
    attempt: int
    envelope: Envelope
    task: Task
    payload: Payload
    place: bool = False
    made: dict[str, Any] | None = None
    late: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One attempt's result. `payload` None keeps the one that is there; the envelope names the sandbox that is kept."""

    envelope: Envelope
    payload: Payload | None = None
    reward: Reward | None = None
    restart: str = ""
