"""`rollout watch` while Redis is away: it stays, says so, and goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Broken
from rich.console import Console

from pipeline.errors import RedisUnavailable
from pipeline.queue import Queue
from workers import view_watch


def look(count: int) -> dict[str, Any]:
    return {
        "line": "l", "time": float(count), "stages": {}, "counts": {"enqueued": count}, "workers": [], "latest": [],
    }  # fmt: skip


async def test_it_stays_while_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([look(1), Broken("cut"), look(2), KeyboardInterrupt()])
    opens: list[int] = []

    async def snapshot(queue: Queue) -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        opens.append(1)
        if len(opens) == 2:
            raise RedisUnavailable("none is published")
        yield None

    monkeypatch.setattr(view_watch, "EVERY", 0.0)
    monkeypatch.setattr(view_watch, "snapshot", snapshot)
    monkeypatch.setattr(view_watch, "_policy", lambda last: view_watch.Text(""))
    shown: list[str] = []
    console = Console(width=200)

    def show(screen: Any) -> None:
        with console.capture() as text:
            console.print(screen)
        shown.append(text.get())

    with pytest.raises(KeyboardInterrupt):
        await view_watch.follow(opened, look(0), show)
    assert "enqueued 1" in shown[0] and "no Redis" not in shown[0]
    assert shown[1].startswith("no Redis for 0 s: ") and "cut" in shown[1] and "enqueued 1" in shown[1]
    assert shown[2].startswith("no Redis for 0 s: none is published")
    assert "enqueued 2" in shown[3] and "no Redis" not in shown[3]
    assert len(opens) == 3
