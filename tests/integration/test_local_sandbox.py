"""The local sandbox with a real bash: answers, ends, what hangs, what floods, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from pipeline.errors import ConfigError, HandlerError, SandboxError, SandboxGone
from workers.sandbox import Driver, Session, driver


@pytest.fixture
def made(tmp_path: Path) -> Driver:
    return driver("local", tmp_path / "root", 20.0)


@pytest.fixture
async def box(made: Driver) -> AsyncIterator[Session]:
    reference = await made.prepare({"files": {"a/b.txt": "hi\n"}}, "g.0-token")
    session = await made.open(reference)
    yield session
    await session.close()
    await made.discard(reference)


def unique(seconds: int) -> str:
    """A length for `sleep` that only this test uses, however many runs share the machine."""
    return f"{seconds}.{os.getpid()}{secrets.randbelow(10**6)}"


def running(word: str) -> list[int]:
    """Pids of living processes with `word` among their arguments."""
    found = psutil.process_iter(["cmdline", "status"])
    return [p.pid for p in found if word in (p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE]


async def gone(word: str, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while running(word) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return not running(word)


@pytest.mark.parametrize(
    ("command", "text", "code"),
    [
        ("echo ok", "ok", 0),
        ("cat a/b.txt; echo $HOME | sed 's|.*/||'", "hi\nhome", 0),
        ("(exit 7)", "", 7),
        ("printf 'a\\nb'; echo err >&2", "a\nberr", 0),
        ("cat <<EOF\n1\n2\nEOF", "1\n2", 0),
        ('awk \'BEGIN{print "x\\"y"}\'', 'x"y', 0),
        ("read x; echo got:$x", "got:", 0),
        ("printf '\\xff x'", "\ufffd x", 0),
        (": " + "x" * 20_000 + "; echo END", "END", 0),
        ("printf '%05000d' 1 | (read -r l; echo ${#l})", "5000", 0),
        ("echo $ROLLOUT_REDIS__URL$SECRET_TOKEN", "", 0),
        ("test -t 0 || echo no input", "no input", 0),
        ("kill -9 $$", "\n[the shell ended; a new one was started: folder and variables are reset]", 137),
        ("sleep 77 & exit 3", "\n[the shell ended; a new one was started: folder and variables are reset]", 3),
        ("echo 'x\ud800'", "x?", 0),
    ],
)
async def test_a_command_says_what_bash_says(
    box: Session, command: str, text: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert await box.bash(command) == (text, code, False)
    assert await box.bash("echo still here") == ("still here", 0, False)


@pytest.mark.parametrize("command", ["echo 'it", "for i in 1 2; do echo $i", "echo $((", "if true"])
async def test_a_command_that_does_not_end_is_bashs_own_error(box: Session, command: str) -> None:
    """H20."""
    began = time.monotonic()
    output = await box.bash(command)
    assert output.exit_code not in (0, None) and output.text.startswith("bash: ") and time.monotonic() - began < 2
    assert (await box.bash("echo ok")).text == "ok"


async def test_folder_variables_and_functions_are_kept(box: Session) -> None:
    for command in ("cd a", "X='5 6'", "f() { echo $X; }", "set -x", "set +x", "set -u; echo $NO", "set +u"):
        await box.bash(command)
    assert await box.bash("f; basename $PWD") == ("5 6\na", 0, False)


async def test_git_log_needs_no_pager(box: Session) -> None:
    """H18."""
    name = "-c user.name=a -c user.email=a@b"
    await box.bash(f"git init -q . && for i in $(seq 40); do git {name} commit -q --allow-empty -m number$i; done")
    output = await box.bash("git log", 10)
    assert output.exit_code == 0 and "number1\n" in output.text + "\n"


@pytest.mark.parametrize("tail", ["", " | cat", " & wait"])
async def test_a_timed_out_command_is_killed_with_what_it_started(box: Session, tail: str) -> None:
    """H14: and the shell goes on with what it had."""
    spin = f"qa_spin_h14_{unique(0)}"
    await box.bash("X=kept; sleep 788 & echo")
    began = time.monotonic()
    output = await box.bash(f'echo begun; {sys.executable} -c "while True: pass" {spin}{tail}', 0.5)
    assert (output.text, output.exit_code, output.timed_out) == ("begun", None, True)
    assert time.monotonic() - began < 4 and await gone(spin, 1)
    assert await box.bash("echo $X; jobs -r | grep -c 'sleep 788'") == ("kept\n1", 0, False)


@pytest.mark.parametrize(
    "loop", ["while :; do :; done", "for i in 1 2 3; do sleep 60; done", "read x </dev/tty", "yes"]
)
async def test_a_shell_that_is_busy_itself_comes_back(box: Session, loop: str) -> None:
    await box.bash("X=kept")
    output = await box.bash(loop, 0.3)
    assert output.timed_out and await box.bash("echo $X") == ("kept", 0, False)


async def test_a_shell_that_does_not_come_back_is_replaced(box: Session) -> None:
    output = await box.bash("trap '' INT; while :; do :; done", 0.2)
    assert output.timed_out and "a new one was started" in output.text
    assert (await box.bash("echo ok")).text == "ok"


@pytest.mark.parametrize(
    "start", ["sleep {} & echo up", "setsid sleep {} & echo up", "nohup sleep {} >log 2>&1 & echo up"]
)
async def test_a_background_process_does_not_hold_the_call_and_ends_with_the_sandbox(
    made: Driver, tmp_path: Path, start: str
) -> None:
    """H15."""
    seconds = unique(600)
    session = await made.open(await made.prepare({}, "h15"))
    try:
        began = time.monotonic()
        assert await session.bash(start.format(seconds)) == ("up", 0, False)
        assert time.monotonic() - began < 2
        assert (await session.bash("echo next")).text == "next" and len(running(seconds)) == 1
    finally:
        await session.close()
    assert await gone(seconds)


async def test_much_output_keeps_its_head_and_its_tail(box: Session) -> None:
    text = (await box.bash("seq 1 300000")).text
    assert text.startswith("1\n2\n") and text.endswith("\n299999\n300000") and len(text) < 40_000
    assert "bytes left out]" in text


async def test_a_flood_does_not_hold_the_event_loop(box: Session) -> None:
    flood = asyncio.create_task(box.bash("yes", 1.0))
    turns, worst = 0, 0.0
    while not flood.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        turns, worst = turns + 1, max(worst, time.monotonic() - before)
    assert (await flood).timed_out and turns > 50 and worst < 0.5


async def test_a_forged_mark_is_only_output(box: Session) -> None:
    assert await box.bash("printf '\\001%032d:0\\002\\n' 7; (exit 5)") == (f"\x01{7:032d}:0\x02", 5, False)


async def test_files_are_written_and_read_whole(box: Session) -> None:
    """H21 (c)."""
    data = os.urandom(200_000)
    await box.write("deep/x.bin", data)
    assert await box.read("deep/x.bin") == data
    assert (await box.bash("sha256sum < deep/x.bin")).text.split()[0] == hashlib.sha256(data).hexdigest()


async def test_a_cancelled_command_does_not_spoil_the_next(box: Session) -> None:
    call = asyncio.create_task(box.bash("sleep 602; echo late"))
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (await box.bash("echo next")).text.endswith("\nnext")


async def test_another_attempt_never_adopts_a_folder(made: Driver) -> None:
    first = await made.prepare({"files": {"x": "1"}}, "g.0-one")
    second = await made.prepare({}, "g.0-two")
    assert first != second and await made.owned() == [first, second]
    assert await made.prepare({"files": {"y": "2"}}, "g.0-one") == first
    session = await made.open(first)
    assert (await session.bash("ls")).text == "y"
    await session.close()
    for _ in range(2):
        await made.discard(first)
    with pytest.raises(SandboxGone):
        await made.open(first)
    assert await made.owned() == [second]


async def test_names_with_odd_characters_stay_inside_the_root(made: Driver, tmp_path: Path) -> None:
    one, two = [await made.prepare({}, name) for name in ("../../x", "..-..-x")]
    assert one != two and all(Path(item["path"]).parent == tmp_path / "root" for item in (one, two))


@pytest.mark.parametrize("path", ["/etc", "/", "", "root/../../x"])
async def test_nothing_but_a_sandbox_is_discarded(made: Driver, tmp_path: Path, path: str) -> None:
    with pytest.raises(SandboxError, match="names no sandbox"):
        await made.discard({"driver": "local", "path": path})


async def test_discard_ends_what_a_dead_worker_left(made: Driver, tmp_path: Path) -> None:
    """What the shell's process left behind, in a session of its own, is found by what it carries."""
    code = (
        "import asyncio, os, sys\nfrom workers.sandbox import driver\n"
        "async def main():\n"
        "    made = driver('local', sys.argv[1], 20)\n"
        "    box = await made.open(await made.prepare({}, 'dead'))\n"
        "    await box.bash(f'setsid nohup sleep {sys.argv[2]} >/dev/null 2>&1 & mkdir ../tmp/ro; chmod 0 ../tmp/ro')\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    seconds = unique(600)
    command = [sys.executable, "-c", code, str(tmp_path / "root"), seconds]
    died = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    assert died.returncode == -signal.SIGKILL and running(seconds)
    (left,) = await made.owned()
    await made.discard(left)
    assert await gone(seconds) and not Path(left["path"]).exists()


async def test_fifty_sandboxes_at_once_do_not_mix(made: Driver) -> None:
    async def one(number: int) -> str:
        session = await made.open(await made.prepare({}, f"n{number}"))
        try:
            await session.bash(f"N={number}")
            return (await session.bash("echo $N $(basename $(dirname $HOME))")).text
        finally:
            await session.close()

    assert await asyncio.gather(*map(one, range(50))) == [f"{number} n{number}" for number in range(50)]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"image": "x"}, "wants 'image'"),
        ({"files": {"../x": ""}}, "relative path"),
        ({"files": {"/x": ""}}, "relative"),
    ],
)
async def test_a_spec_that_can_not_be_met_is_the_handlers_fault(
    made: Driver, spec: dict[str, object], words: str
) -> None:
    with pytest.raises(HandlerError, match=words):
        await made.prepare(spec, "x")


async def test_a_root_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(SandboxError, match="this user alone"):
        await driver("local", tmp_path / "open", 1).prepare({}, "x")
    with pytest.raises(ConfigError, match="there are: local"):
        driver("docker", tmp_path, 1)
