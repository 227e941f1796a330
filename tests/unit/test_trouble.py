"""What is told as a trouble of a lane, and what is not."""

from __future__ import annotations

import pytest

from pipeline import trouble, waiting
from pipeline.config import Config
from pipeline.queue import Queue
from tests import line


async def test_what_is_at_work_is_found_among_many_of_another_lane(queue: Queue) -> None:
    """It would be said that nothing is in flight while the last long ones of a batch play."""
    evaluated = trouble.PAGE + 20
    await line.put(queue, "e", samples=evaluated, lane="eval")
    await queue.claim("init", evaluated, "w")
    assert not await trouble._has_working(queue, "init", "train")
    await line.put(queue, "t", lane="train")
    await queue.claim("init", 1, "w")
    assert await trouble._has_working(queue, "init", "train")


async def test_too_many_to_be_looked_at_are_no_trouble(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "PAGES", 1)
    await line.put(queue, "e", samples=trouble.PAGE, lane="eval")
    await queue.claim("init", trouble.PAGE, "w")
    assert await trouble._has_working(queue, "init", "train")


def test_a_delivery_shows_that_the_lane_was_not_idle(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks in two short waits, with a batch between them, are not one idleness."""
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    watch = waiting.Watch(Config(), "train", "me")
    for _ in range(3):
        watch._heard({"nothing": "nothing is in flight"})
        watch.delivered()
        now[0] += 2.0
    assert caplog.messages == []
    watch._heard({"nothing": "nothing is in flight"})
    now[0] += 2.0
    watch._heard({"nothing": "nothing is in flight"})
    watch.delivered()
    assert [message.partition("lane train: ")[2] for message in caplog.messages] == [
        "nothing is in flight",
        "that is over, after 2 s: nothing is in flight",
    ]


async def test_workers_that_can_not_read_the_payload_files_are_told(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def memory() -> tuple[int, int]:  # fakeredis does not know INFO
        return 0, 0

    monkeypatch.setattr(queue, "memory", memory)
    await line.put(queue)
    await queue.beat("w", {"stage": "init", "running": 0, "blind": True}, [])
    assert "payload.dir" in (await trouble.troubles(queue, "train", "me"))["workers:init"]
    await queue.beat("v", {"stage": "init", "running": 0, "blind": False}, [])
    assert "workers:init" not in await trouble.troubles(queue, "train", "me")
