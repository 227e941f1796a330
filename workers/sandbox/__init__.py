"""Sandboxes behind three verbs: `prepare` makes one, `open` lets one attempt act in it, `discard` removes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import ConfigError
from pipeline.interfaces import Sandbox

DRIVERS = ("local",)


class Session(Sandbox, Protocol):
    """An open sandbox that whoever opened it closes again."""

    async def close(self) -> None: ...


class Driver(Protocol):
    """One way to make sandboxes. A reference is a small map (msgpack types) that names one sandbox."""

    async def prepare(self, spec: dict[str, Any], name: str) -> dict[str, Any]:
        """Make the sandbox called `name` (rollout id and attempt's token: never another attempt's). Raises
        SandboxError, and HandlerError for a spec that can't be met."""
        ...

    async def open(self, reference: dict[str, Any]) -> Session:
        """Raises SandboxGone when there is nothing to open, SandboxError when it does not start."""
        ...

    async def discard(self, reference: dict[str, Any]) -> None:
        """Remove the sandbox and end what still runs in it. Safe twice."""
        ...

    async def owned(self) -> list[dict[str, Any]]:
        """References of all sandboxes that this driver has under its root."""
        ...


def driver(name: str, root: str | Path, command_timeout: float) -> Driver:
    """The driver called `name`. `root`: folder of its sandboxes; `command_timeout`: seconds one command may take."""
    if name == "local":
        from workers.sandbox.local import Local

        return Local(Path(root), command_timeout)
    raise ConfigError(f"sandbox.driver is {name!r}, there are: {', '.join(DRIVERS)}")
