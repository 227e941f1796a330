"""The canary tells of a signal to the whole job, before anybody believes what another child did."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest

from workers import canary as canary_module
from workers.canary import Canary


async def started(told: list[str]) -> tuple[Canary, list[psutil.Process]]:
    """One, and its processes: the outer shell and the inner one."""
    before = set(psutil.Process().children())
    canary = Canary(told.append)
    await canary.start()
    (outer,) = set(psutil.Process().children()) - before
    return canary, [outer, *outer.children()]


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


async def test_it_lives_as_long_as_it_is_wanted() -> None:
    told: list[str] = []
    canary, shells = await started(told)
    assert len(shells) == 2
    await canary.settled()
    canary.close()
    canary.close()
    assert not told
    assert gone(shells)
    await canary.settled()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_is_known_as_soon_as_it_was_sent(number: signal.Signals) -> None:
    """Not when it has been acted on: on a machine that is busy that may be later than what it is asked about."""
    told: list[str] = []
    canary, shells = await started(told)
    for shell in reversed(shells):
        os.kill(shell.pid, number)
    await canary.settled()
    assert told == [f"{number.name} reached all processes of its job"]
    assert gone(shells)
    await canary.settled()
    canary.close()
    assert len(told) == 1


async def test_one_that_has_had_no_processor_yet_counts_too() -> None:
    told: list[str] = []
    canary, (outer, inner) = await started(told)
    for shell in (outer, inner):
        os.kill(shell.pid, signal.SIGSTOP)
    os.kill(inner.pid, signal.SIGTERM)  # it is stopped, so this waits for it
    waiting = asyncio.create_task(canary.settled())
    assert not (await asyncio.wait({waiting}, timeout=0.3))[0], "the signal was not seen"
    for shell in (inner, outer):
        with contextlib.suppress(ProcessLookupError):
            os.kill(shell.pid, signal.SIGCONT)
    await waiting
    assert told == ["SIGTERM reached all processes of its job"]
    canary.close()


async def test_ctrl_c_is_not_for_it() -> None:
    told: list[str] = []
    canary, shells = await started(told)
    for shell in shells:
        os.kill(shell.pid, signal.SIGINT)
    await canary.settled()
    assert all(shell.is_running() for shell in shells) and not told
    canary.close()


async def test_it_holds_back_where_the_order_is_not_known() -> None:
    """A signal that comes to it later than to others is waited for, unless it is the first of all children."""
    told: list[str] = []
    earlier = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        canary, shells = await started(told)
        canary.hold, canary.by_pid = 0.3, True
        asyncio.get_running_loop().call_later(0.1, lambda: [shell.terminate() for shell in shells])
        first = shells[0].pid < earlier.pid  # the pids have overflown just now
        began = time.monotonic()
        await canary.settled()
        assert first or (told and time.monotonic() - began >= 0.1)
        canary.close()
    finally:
        earlier.kill()
        await earlier.wait()


async def test_it_holds_nothing_back_where_it_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    children = canary_module._children
    others = children()  # of the tests that ran in this process before
    monkeypatch.setattr(canary_module, "_children", lambda: children() - others)
    canary, (outer, _) = await started(told)
    later = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        canary.hold, canary.by_pid = 30.0, True
        if later.pid > outer.pid:  # else the pids have overflown just now
            await asyncio.wait_for(canary.settled(), 5.0)
        canary.by_pid = False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(canary.settled(), 0.2)
    finally:
        later.kill()
        await later.wait()
        canary.close()
