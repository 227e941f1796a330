"""Terminal output as plain text, bounded; and the reading end of a PTY that sees its mark and nothing else."""

from __future__ import annotations

import asyncio
import os
import pty
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, strategies

from workers.sandbox.tools.plain import WIDTH, Clip, plain, with_notes
from workers.sandbox.tools.terminal import Terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[38;2;1;2;3mx\x1b[m\x1b[?25l\x1b[2Jy", "xy"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1bPq#0\x1b\\x\x1b(B\x1b=y\x1b7", "xy"),
        ("10%\r20%\r100%", "100%"),
        ("long line\rshort", "shortline"),
        ("long line\r\x1b[Kshort", "short"),
        ("long\x1b[2K\rx", "x"),
        ("dos\r\nline\r\n", "dos\nline\n"),
        ("ab\b\bc\bd", "db"),
        ("\b\bx", "x"),
        ("a\x1b[3Cb\x1b[2D-\x1b[1Gz", "z  -b"),
        ("bell\x07\x00\x0b\x0c\x7f\x85.", "bell."),
        ("cut\x1b[3", "cut"),
        ("cut\x1b", "cut"),
        ("\u00e4\u4e2d\r\u00f6", "\u00f6\u4e2d"),
    ],
)
def test_text_is_what_a_terminal_would_show(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(strategies.text(alphabet=strategies.sampled_from("ab\n\r\b\x1b[]0;19KCDGm\x07\\"), max_size=200))
def test_no_control_survives_and_nothing_grows(text: str) -> None:
    shown = plain(text)
    assert not any(ord(c) < 32 and c not in "\t\n" for c in shown)
    assert len(shown) <= len(text) + WIDTH * text.count("\x1b[")


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[" * 100_000,
        "\x1b]" * 100_000,
        "\x1b[" + "1;" * 100_000,
        "\x1b]0;" + "x" * 200_000,
        "\r" * 100_000 + "\b" * 100_000,
        "x\r" * 100_000,
        "\x1b[9999C" * 30_000,
        "\x1b[1K\x1b[2K" * 10_000,
    ],
)
def test_hostile_text_takes_linear_time(hostile: str) -> None:
    began = time.monotonic()
    plain(hostile)
    assert time.monotonic() - began < 5


def test_a_clip_keeps_head_and_tail_and_counts_the_rest() -> None:
    clip = Clip(half=1000)
    for number in range(10_000):
        clip.add(b"%d\n" % number)
    text = clip.take()
    head, _, rest = text.partition("\n[")
    count, _, tail = rest.partition(" bytes left out]\n")
    assert head.startswith("0\n1\n") and tail.endswith("\n9999\n") and tail.splitlines()[0].isdecimal()
    assert len(head) + int(count) + len(tail) == sum(len(f"{n}\n") for n in range(10_000))
    assert clip.take() == ""


@pytest.mark.parametrize("size", [999, 1000, 1001, 1999, 2000])
def test_what_fits_is_whole_wherever_the_halves_meet(size: int) -> None:
    clip = Clip(half=1000)
    text = ("\u00e4\x1b[1m" * 1000).encode()[:size].decode("utf-8", "ignore")
    clip.add(text.encode())
    assert clip.take() == plain(text)


def test_a_cut_splits_no_character() -> None:
    clip = Clip(half=1001)
    clip.add("\u4e2d".encode() * 5000)
    assert set(clip.take().partition("\n[")[2].partition("]\n")[2]) == {"\u4e2d"}


def test_notes_stand_in_brackets() -> None:
    assert (
        with_notes("x", ["a", "b"]) == "x\n[a]\n[b]" and with_notes("", ["a"]) == "[a]" and with_notes("x", []) == "x"
    )


MARK = "0123456789abcdef" * 2


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Terminal, int]]:
    """A terminal that reads one end of a PTY, and the other end to write to."""
    mine, theirs = pty.openpty()
    os.set_blocking(mine, False)
    reader = Terminal(mine, os.getpid())
    yield reader, theirs
    reader.stop()
    os.close(mine)
    os.close(theirs)


async def test_the_mark_ends_a_wait_and_is_not_output(ends: tuple[Terminal, int]) -> None:
    reader, fd = ends
    reader.expect(MARK)
    os.write(fd, f"before \x01{'f' * 32}:1\x02 \x01{MARK}:17\x02".encode())
    assert await reader.wait(5) == 17
    assert reader.take() == f"before {'f' * 32}:1 "


async def test_a_late_mark_is_taken_out_and_does_not_end_the_next_wait(ends: tuple[Terminal, int]) -> None:
    reader, fd = ends
    reader.expect("a" * 32)
    assert await reader.wait(0.01) is None
    reader.expect(MARK)
    os.write(fd, f"x\x01{'a' * 32}:130\x02y".encode())
    assert await reader.wait(0.05) is None
    os.write(fd, f"\x01{MARK}:0\x02".encode())
    assert await reader.wait(5) == 0 and reader.take() == "xy"


async def test_a_wait_can_be_given_up_and_ends_with_the_terminal(ends: tuple[Terminal, int]) -> None:
    reader, _ = ends
    reader.expect(MARK)
    asyncio.get_running_loop().call_later(0.01, reader.give_up)
    assert await reader.wait(60) is None


async def test_output_without_a_mark_stays_bounded(ends: tuple[Terminal, int]) -> None:
    reader, fd = ends
    for _ in range(100):
        await asyncio.to_thread(os.write, fd, b"x" * 999 + b"\n")
    reader.expect(MARK)
    os.write(fd, f"\x01{MARK}:0\x02".encode())
    assert await reader.wait(5) == 0
    assert len(reader.take()) < 40_000
