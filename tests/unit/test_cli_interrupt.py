"""Ctrl-C ends a coroutine even when its first cancel is swallowed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from workers import interrupt


async def stubborn(cancels: int, number: int) -> None:
    """Sends itself a signal, and swallows so many cancels."""
    os.kill(os.getpid(), number)
    for _ in range(cancels):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    await asyncio.Event().wait()


@pytest.mark.parametrize("cancels", [0, 1, 3])
def test_a_swallowed_cancel_is_repeated(monkeypatch: pytest.MonkeyPatch, cancels: int) -> None:
    monkeypatch.setattr(interrupt, "AGAIN", 0.001)
    with pytest.raises(KeyboardInterrupt):
        interrupt.run(stubborn(cancels, signal.SIGINT))


def test_another_signal_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "AGAIN", 0.001)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(interrupt.Interrupted) as caught:
        interrupt.run(stubborn(0, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM))
    assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_that_is_still_being_loaded_ends_with_a_word() -> None:
    script = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "workers.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from workers.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\nError: interrupted\n")


def test_results_and_errors_pass() -> None:
    async def answer(error: bool) -> int:
        if error:
            raise KeyError("x")
        return 3

    assert interrupt.run(answer(False)) == 3
    with pytest.raises(KeyError):
        interrupt.run(answer(True))


def test_an_error_that_the_cancel_caused_is_an_interrupt() -> None:
    async def broken() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("cut off") from None

    with pytest.raises(KeyboardInterrupt):
        interrupt.run(broken())
