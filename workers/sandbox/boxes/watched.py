"""What the watchdogs need of a box."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from workers.sandbox.boxes.limits import Cgroup, Limits
from workers.sandbox.processes import Process


class Watched(Protocol):
    """A box that is held to its limits."""

    name: str
    folder: Path
    notes: list[str]
    limits: Limits
    group: Cgroup | None
    pid: int | None

    def processes(self) -> list[Process]: ...

    def alive(self) -> bool: ...
