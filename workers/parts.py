"""What a worker process has for its attempts, as the stages see it: sandboxes here and elsewhere, child processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pipeline.envelope import Payload
from pipeline.interfaces import Reward
from pipeline.log import AttemptLog

if TYPE_CHECKING:
    from workers.job import Job


class Near(Protocol):
    """A sandbox of this process (`workers.sandbox.live.Live`)."""

    reference: dict[str, Any]
    session: Any


class Stock(Protocol):
    """The sandboxes of this process (`workers.sandbox.stock.Stock`)."""

    async def prepare(self, asked: dict[str, Any], *, id: str, token: str, lane: str) -> Near: ...

    def get(self, name: str) -> Near | None: ...

    async def discard(self, name: str) -> None: ...

    async def wait_for_place(self, token: str, lane: str) -> None: ...

    def release(self, token: str) -> None: ...


class Hosts(Protocol):
    """The way to sandboxes of other processes (`workers.sandbox.client.Hosts`)."""

    async def open(
        self, reference: dict[str, Any], *, id: str, token: str, stage: str, resume: bool = False
    ) -> Any: ...

    async def until_dead(self, reference: dict[str, Any]) -> NoReturn: ...

    async def close(self) -> None: ...


class Caller(Protocol):
    """Runs a plain `def` method, or a plain function, in a child process."""

    async def method(self, job: Job, name: str, log: AttemptLog) -> tuple[Payload, Reward | None]: ...

    async def function(
        self, job: Job, log: AttemptLog, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
    ) -> Any: ...
