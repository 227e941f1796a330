"""A sandbox host that is asked twice, told wrong, filled up or left hanging: what must hold all the same."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.errors import SandboxError, SandboxGone
from pipeline.interfaces import Completion
from tests.integration.test_sandbox_host import Served, config, served
from tests.services import redis_service, session_redis
from workers.replay import Replay
from workers.sandbox import client as client_module, live as live_module, stock as stock_module
from workers.sandbox.client import Hosts, RemoteSandbox
from workers.sandbox.journal import Journal
from workers.sandbox.replies import Fenced
from workers.sandbox.tools.session import Session

__all__ = ["config", "redis_service", "served", "session_redis"]


async def opened(served: Served, live: Any, token: str, stage: str, **about: Any) -> RemoteSandbox:
    return await served.hosts.open(live.reference, id="g.0", token=token, stage=stage, **about)


async def test_an_open_that_was_refused_is_refused_again(served: Served) -> None:
    live = await served.make()
    first = await served.open(live, "t-1")
    await first.bash("true")
    for _ in range(2):  # the reply to the first one was lost
        with pytest.raises(SandboxGone, match="starts over"):
            await served.open(live, "t-2")
    with pytest.raises(Fenced):
        await first.bash("true")


async def test_a_host_that_ends_while_redis_is_away_is_gone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await served.make()
    queue = served.host._queue
    assert queue is not None
    queue.close_within(0.2)

    async def away(*_: Any) -> Any:
        raise RedisConnectionError("nobody listens")

    monkeypatch.setattr(queue.pipe, "execute", away)
    with pytest.raises(SandboxGone, match="ends and can't ask whose it is"):  # a loss; a SandboxError is an attempt
        await opened(served, live, "t-1", "run")


async def test_time_without_redis_counts_against_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead host on another machine, and a Redis that is away for longer than a host is tried: a loss in the end."""
    monkeypatch.setattr(client_module, "PATIENCE", 0.2)
    back = asyncio.get_running_loop().time() + 1.5

    async def silent(_: str) -> float:
        return 0.0 if asyncio.get_running_loop().time() < back else 9.0

    hosts = Hosts(0.2, silent)
    reference = {"host": "host-2", "node": "elsewhere", "name": "x", "tcp": "127.0.0.9:9", "tls": "00" * 32}
    with pytest.raises(SandboxGone, match="host-2 is gone"):
        await hosts.open(reference, id="g.0", token="t-1", stage="run")
    assert asyncio.get_running_loop().time() >= back
    await hosts.close()
    hosts = Hosts(0.2, lambda _: asyncio.sleep(0, 0.1))  # it lives, and is out of reach
    with pytest.raises(SandboxError, match="can't be reached"):
        await hosts.open(reference, id="g.0", token="t-1", stage="run")
    await hosts.close()


async def test_a_repeated_open_waits_for_the_first_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await served.make()
    run = await served.open(live, "t-1")
    run.note_turn(b"of RUN")
    assert (await run.bash("echo run")).text == "run"
    real = Session.fresh

    async def slow(self: Session) -> None:
        await asyncio.sleep(0.3)
        await real(self)

    monkeypatch.setattr(Session, "fresh", slow)
    await served.holds("t-2", "eval", live)
    one, two = await asyncio.gather(*(opened(served, live, "t-2", "eval") for _ in range(2)))
    assert one._headers == two._headers and one.turns == two.turns == []
    assert (await two.bash("echo eval")).text == "eval"  # action 1 of EVAL, and not the stored one of RUN


async def test_an_open_that_failed_half_way_is_made_whole(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await served.make()
    run = await served.open(live, "t-1")
    await run.bash("echo run")
    real, failures = Journal.__init__, [OSError(errno.ENOSPC, "No space left on device")]

    def full(self: Journal, *args: Any) -> None:
        if failures:
            raise failures.pop()
        real(self, *args)

    monkeypatch.setattr(Journal, "__init__", full)
    await served.holds("t-2", "eval", live)
    with pytest.raises(SandboxError, match="No space left on device; is the disk full"):
        await opened(served, live, "t-2", "eval")
    assert (await (await opened(served, live, "t-2", "eval")).bash("echo eval")).text == "eval"


async def test_an_action_that_outlives_its_stage_answers_nothing_of_the_next_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await served.make()
    run = await served.open(live, "t-1")
    real, go = Session.bash, asyncio.Event()

    async def stubborn(self: Session, command: str, timeout: float | None = None) -> Any:
        while command == "hang" and not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        return await real(self, "echo late" if command == "hang" else command, timeout)

    monkeypatch.setattr(Session, "bash", stubborn)
    monkeypatch.setattr(live_module, "STOP_SECONDS", 0.1)
    hanging = asyncio.create_task(run.bash("hang"))
    async with asyncio.timeout(5):
        while not live._running:
            await asyncio.sleep(0.01)
    await served.holds("t-2", "eval", live)
    scored = await opened(served, live, "t-2", "eval")
    assert (await scored.bash("echo 1")).text == "1"
    go.set()
    await asyncio.wait({hanging}, timeout=5)
    assert hanging.done()
    assert (await scored.bash("echo 2")).text == "2"


async def test_a_full_disk_runs_nothing_that_it_can_not_note(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await served.make()
    box = await served.open(live, "t-1")
    real, full = os.pwrite, True

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(SandboxError, match="is the disk full"):
        await box.bash("echo 1 >> count")
    full = False
    box.note_turn(b"turn")
    call = asyncio.create_task(box.bash("sleep 0.3; echo 2 >> count; cat count"))
    async with asyncio.timeout(5):
        while not live._running:
            await asyncio.sleep(0.01)
    full = True  # its result can't be written: a repeat is answered all the same
    assert (await call).text == "2"
    box._number -= 1
    assert (await box.bash("sleep 0.3; echo 2 >> count; cat count")).text == "2"


async def test_a_box_that_can_not_be_made_for_want_of_disk_is_a_sandbox_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(served.host.stock.driver, "create", create)
    served.host.stock.promise("nonce-0", "train")
    with pytest.raises(SandboxError, match="No space left on device"):
        await served.make()
    served.host.stock.release("nonce-0")
    assert served.host.stock.taken == 0


async def test_places_come_back_whatever_becomes_of_hundreds_of_sandboxes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts that fail, or are cancelled at any moment while their sandbox is made; every fiftieth is a real one."""
    stock, driver = served.host.stock, served.host.stock.driver
    real = type(driver).create

    async def create(spec: Any, name: str) -> Any:
        number = int(name.rpartition("-")[2])
        await asyncio.sleep(0.002 * (number % 3))
        if number % 50:
            raise SandboxError("it did not start")
        return await real(driver, spec, name)

    monkeypatch.setattr(driver, "create", create)

    async def attempt(number: int) -> None:
        token = f"nonce-{number}"
        stock.promise(token, "train")
        try:
            await stock.prepare({}, id="g.0", token=token, lane="train")
        finally:
            stock.release(token)

    for at in range(0, 600, 20):
        tasks = [asyncio.create_task(attempt(at + number)) for number in range(20)]
        for number, task in enumerate(tasks):
            if number % 2 == 0:
                await asyncio.sleep(0.003)
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(stock.discard(name) for name in list(stock.live)))
    async with asyncio.timeout(10):
        await stock.wait_until_empty()
    assert stock.taken == 0 and stock.places().free == stock.max_live
    assert not [path for path in served.host._root.iterdir() if path.is_dir()]


async def test_one_that_does_not_end_holds_up_no_other(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, other = [await served.make(token) for token in ("a-0", "b-0")]
    never = asyncio.Event()
    monkeypatch.setattr(stuck.session, "close", never.wait)
    monkeypatch.setattr(stock_module, "END_SECONDS", 0.3)
    await served.holds("t-9", "run")
    assert await served.host.look() == 2
    async with asyncio.timeout(10):
        await served.host.stock.wait_until_empty()
    assert not stuck.box.folder.exists() and not other.box.folder.exists()


async def test_what_could_not_be_removed_is_removed_later(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await served.make()
    real = live.box.discard

    async def fails() -> None:
        raise SandboxError("a mount is left in it")

    monkeypatch.setattr(live.box, "discard", fails)
    await served.host.stock.discard(live.box.name)
    await served.host.stock.wait_until_empty()
    assert live.box.folder.exists()
    monkeypatch.setattr(live.box, "discard", real)
    served.host.stock.remove_again()
    await served.host.stock.wait_until_empty()
    assert not live.box.folder.exists()


async def test_taken_away_is_gone_and_not_another_attempts(served: Served) -> None:
    """Fenced would leave the lease to run out, as if the worker had died."""
    live = await served.make()
    box = await served.open(live, "t-1")
    await served.queue.execute("HDEL", served.queue.key("r", "g.0"), "sandbox")
    with pytest.raises(SandboxGone, match="was taken away"):
        await opened(served, live, "t-1", "run", resume=True)
    await live.end()
    with pytest.raises(SandboxGone):
        await box.bash("true")
    assert isinstance(box.broken, SandboxGone)


class Slow:
    """A policy whose later calls may end first."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    async def generate(self, prompt_ids: Any, sampling: dict[str, Any]) -> Completion:
        await asyncio.sleep(self.seconds.pop(0))
        return Completion(
            ids=[*prompt_ids, sampling["seed"]], logprobs=[0.0] * (len(prompt_ids) + 1), versions=[],
            finish_reason="stop", sampling=sampling, started=0.0, seconds=0.0,
        )  # fmt: skip


class Notes:
    def __init__(self, turns: list[bytes]) -> None:
        self.turns, self.noted = turns, []  # type: ignore[var-annotated]

    def note_turn(self, turn: bytes) -> None:
        self.noted.append(turn)


async def test_calls_side_by_side_are_replayed_each_its_own() -> None:
    notes = Notes([])
    live = Replay(Slow([0.05, 0.02, 0.0]), notes)
    asked = [([1], {"seed": 1}), ([1], {"seed": 2}), ([1, 2], {"seed": 1})]
    said = await asyncio.gather(*(live.generate(*one) for one in asked))
    again = Replay(Slow([]), Notes(notes.noted))
    assert await asyncio.gather(*(again.generate(*one) for one in asked)) == said
    other = Replay(Slow([]), Notes(notes.noted))
    for prompt, sampling in (([9], {"seed": 1}), asked[0]):  # a handler that catches the first hears it again
        with pytest.raises(SandboxGone, match="can't be replayed"):
            await other.generate(prompt, sampling)
    assert isinstance(other.broken, SandboxGone)
