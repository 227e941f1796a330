"""The bash tool in every kind of box: answers, ends, what hangs, what floods, and that nothing is left of a call."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tests.boxes import Site, until
from tests.sessions import DRIVERS, boxed, either, gone, image_cache, make, running, session, short_root, site, unique
from workers.sandbox.tools import shell
from workers.sandbox.tools.session import Session

__all__ = ["boxed", "either", "image_cache", "session", "short_root", "site"]

ENDED = "[the shell ended; a new one was started: folder and variables are reset]"
SAID = (
    ("echo ok", "ok", 0),
    ("cat a/b.txt; cd; pwd | grep -c .", "hi\n1", 0),
    ("(exit 7)", "", 7),
    ("return 6", "", 6),
    ("printf 'a\\nb'; echo err >&2; echo c", "a\nberr\nc", 0),
    ("cat <<EOF\n1\n2\nEOF", "1\n2", 0),
    ("f() {\n  echo $1\n}\nf x", "x", 0),
    ('awk \'BEGIN{print "x\\"y"}\'', 'x"y', 0),
    ("read x; echo got:$x", "got:", 0),
    ("read x </dev/tty || echo none", "bash: /dev/tty: No such device or address\nnone", 0),
    ("read x <&1 || echo none", "bash: read: read error: 0: Bad file descriptor\nnone", 0),
    ("printf '\\xff x'", "\ufffd x", 0),
    ("printf '\\303\\244'", "\u00e4", 0),
    (": " + "x" * 20_000 + "; echo END", "END", 0),
    ("printf '%05000d' 1 | (read -r l; echo ${#l})", "5000", 0),
    ("echo $ROLLOUT_REDIS__URL$SECRET_TOKEN", "", 0),
    ("test -t 0 || echo no input", "no input", 0),
    ("printf '\\033[1;31mred\\033[0m \\033]0;title\\007\\033(B12%%\\r100%%\\nab\\b\\bc'", "100%12%\ncb", 0),
    ("PS1='$ '", "", 0),
    ("echo 'x\ud800'", "x?", 0),
    ("kill -9 $$", ENDED, 137),
    ("sleep 77 & exit 3", ENDED, 3),
    ("exec echo out", f"out\n{ENDED}", 0),
    ("set -e; echo in; false; echo not", f"in\n{ENDED}", 1),
)  # fmt: skip


async def test_a_command_says_what_bash_says(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """H18, H20, H21 (a, b), and much else that a model writes."""
    monkeypatch.setenv("SECRET_TOKEN", "x")
    for command, text, code in SAID:
        assert (command[:60], await session.bash(command)) == (command[:60], (text, code, False))
        assert await session.bash("echo still here") == ("still here", 0, False)


async def test_h20_a_command_that_does_not_end_is_bashs_own_error(session: Session) -> None:
    for command in ("echo 'it", "for i in 1 2; do echo $i", "echo $((", "if true"):
        began = time.monotonic()
        output = await session.bash(command)
        assert output.exit_code not in (0, None) and output.text.startswith("bash: line ")
        assert time.monotonic() - began < 2
        assert (await session.bash("echo ok")).text == "ok"


async def test_folder_variables_and_functions_are_kept(boxed: Session) -> None:
    for command in ("cd a", "X='5 6'", "f() { echo $X; }", "set -x", "set +x", "set -v", "set +v", "PS1='% '"):
        await boxed.bash(command)
    assert (await boxed.bash("set -u; echo $NO")).text.endswith("NO: unbound variable")
    assert await boxed.bash("set +u; f; basename $PWD") == ("5 6\na", 0, False)


async def test_h18_git_log_needs_no_pager_and_a_password_is_not_waited_for(either: Session) -> None:
    name = "-c user.name=a -c user.email=a@b"
    await either.bash(f"git init -q . && for i in $(seq 40); do git {name} commit -q --allow-empty -m number$i; done")
    output = await either.bash("git log", 10)
    assert output.exit_code == 0 and "number1\n" in output.text + "\n"
    output = await either.bash("python3 -c 'import getpass; getpass.getpass()'", 10)
    assert output.exit_code == 1 and "EOFError" in output.text
    assert (await either.bash("python3 -c 'input()'", 10)).exit_code == 1


async def test_h14_a_timed_out_command_is_killed_with_what_it_started(session: Session) -> None:
    """And the shell goes on with what it had; what ran in the background before is not touched."""
    earlier = unique(788)
    await session.bash(f"X=kept; sleep {earlier} & (setsid sleep {earlier} &)")
    for tail in ("", " | cat", " & wait", " & disown; (setsid sleep 60 &) ; sleep 60"):
        spin = f"qa_spin_h14_{unique(0)}"
        began = time.monotonic()
        output = await session.bash(f'echo begun; python3 -c "while True: pass" {spin}{tail}', 0.4)
        assert output.text.startswith("begun") and (output.exit_code, output.timed_out) == (None, True)
        assert time.monotonic() - began < 4 and await gone(spin, 1)
        assert await session.bash("echo $X") == ("kept", 0, False)
    assert len(running(earlier)) == 2


async def test_a_shell_that_is_busy_itself_comes_back(either: Session) -> None:
    for loop in ("while :; do :; done", "while :; do sleep 60; done", "yes", "cat /dev/zero"):
        await either.bash("X=kept")
        output = await either.bash(loop, 0.2)
        assert output.timed_out
        assert await either.bash("echo $X") == ("kept", 0, False)


async def test_a_shell_that_does_not_come_back_is_replaced(either: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "STOP_SECONDS", 0.2)
    output = await either.bash("trap '' INT; while :; do :; done", 0.2)
    assert output.timed_out and "a new one was started" in output.text
    assert await either.bash("pwd; echo ok | cat") == (f"{(await either.bash('echo ~')).text}\nok", 0, False)


async def test_h15_a_background_process_does_not_hold_the_call(site: Site) -> None:
    for kind in DRIVERS:
        made, box = await make(site, kind, name=f"h15-{kind}")
        for start in ("sleep {} & echo up", "setsid sleep {} & echo up", "nohup sleep {} >log 2>&1 & echo up"):
            seconds = unique(600)
            began = time.monotonic()
            assert await made.bash(start.format(seconds), 30) == ("up", 0, False)
            assert time.monotonic() - began < 2
            assert (await made.bash("echo next")).text == "next"
            async with asyncio.timeout(5):
                while len(running(seconds)) != 1:  # it may not have become `sleep` yet
                    await asyncio.sleep(0.02)
        await made.fresh()
        assert len(running(seconds)) == 1  # a new stage keeps what runs
        await made.close()
        await box.discard()
        assert await gone(seconds)


async def test_much_output_keeps_its_head_and_its_tail(boxed: Session) -> None:
    text = (await boxed.bash("seq 1 300000")).text
    head, _, tail = text.partition("\n[")
    assert text.startswith("1\n2\n") and text.endswith("\n299999\n300000") and len(text) < 40_000
    cut = int(tail.split(" bytes left out]\n")[0])
    assert len(head) + cut + len(tail.partition("\n")[2]) == len("".join(f"{i}\n" for i in range(1, 300_001))) - 1


async def test_a_flood_does_not_hold_the_event_loop(boxed: Session) -> None:
    flood = asyncio.create_task(boxed.bash("yes", 1.0))
    turns, worst = 0, 0.0
    while not flood.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        turns, worst = turns + 1, max(worst, time.monotonic() - before)
    assert (await flood).timed_out and turns > 20 and worst < 1


async def test_a_forged_mark_is_only_output(boxed: Session) -> None:
    assert await boxed.bash("printf '\\001%032d:0\\002\\n' 7; (exit 5)") == (f"{7:032d}:0", 5, False)


async def test_a_cancelled_command_is_ended_and_does_not_spoil_the_next(either: Session) -> None:
    word = unique(602)
    call = asyncio.create_task(either.bash(f"X=kept; sleep {word}; echo late"))
    waiting = asyncio.create_task(either.bash("touch never"))
    assert await until(lambda: len(running(word)) == 1)
    for task in (waiting, call):
        task.cancel()
    await asyncio.gather(call, waiting, return_exceptions=True)
    assert call.cancelled() and waiting.cancelled()
    assert await either.bash("echo $X; ls never 2>/dev/null") == ("kept", 2, False)
    assert await gone(word)


async def test_a_fresh_stage_has_a_new_shell(boxed: Session) -> None:
    await boxed.bash("X=1; cd a; touch kept")
    await boxed.fresh()
    assert await boxed.bash("echo $X; ls a | cat") == ("\nb.txt\nkept", 0, False)


@pytest.mark.parametrize("kind", ["bubblewrap", "apptainer"])
async def test_a_sandbox_that_died_is_started_again_and_the_policy_told(site: Site, kind: str) -> None:
    made, box = await make(site, kind)
    await made.start()
    await made.bash("echo kept > ~/x")
    assert box.pid is not None
    word = unique(60)
    call = asyncio.create_task(made.bash(f"sleep {word}"))
    assert await until(lambda: len(running(word)) == 1)
    os.kill(box.pid, signal.SIGKILL)
    output = await call
    assert output.exit_code != 0 and "started again" in output.text
    os.kill(box.pid, signal.SIGKILL)
    assert await until(lambda: not box.alive())
    assert await made.read("x") == b"kept\n"  # files bring it back as well
    output = await made.bash("cat ~/x")
    assert output.exit_code == 0 and "a new shell was started" in output.text and "started again" in output.text
    assert await made.bash("echo ok") == ("ok", 0, False)
    await made.close()


async def test_notes_are_told_once(site: Site) -> None:
    made, box = await make(site, "local")
    box.notes.append("a process was killed")
    assert (await made.bash("echo x")).text == "x\n[a process was killed]"
    assert (await made.bash("echo x")).text == "x"
    await made.close()


async def test_nothing_leaks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "STOP_SECONDS", 0.2)
    made, box = await make(site, "bubblewrap")
    await made.bash("true")
    await made.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    before = held()
    for end in ("exit 1", "sleep 60", "trap '' INT; while :; do :; done"):
        await made.bash(end, 0.2)
        call = asyncio.create_task(made.bash("sleep 60"))
        await asyncio.sleep(0.01)
        call.cancel()
        await made.read("a/b.txt")
        await made.close()
    assert await until(lambda: held() == before)
    assert list(box.sockets.iterdir()) == [] and box.processes() == []


async def test_twenty_sessions_at_once_do_not_mix(site: Site) -> None:
    async def one(number: int) -> str:
        made, _ = await make(site, "bubblewrap", name=f"n{number}")
        try:
            await made.bash(f"N={number}; echo {number} > ~/n")
            return (await made.bash("echo $N $(cat ~/n)")).text
        finally:
            await made.close()

    assert await asyncio.gather(*map(one, range(20))) == [f"{number} {number}" for number in range(20)]
