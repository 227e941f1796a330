"""From inside, trying to use more than the sandbox may: memory, processes, disk."""

from __future__ import annotations

import asyncio
import os

import pytest

from pipeline.errors import HandlerError, SandboxError
from tests.boxes import ISOLATING, Site, image_cache, run, short_root, site, until
from workers.sandbox.box import Box, Spec
from workers.sandbox.boxes import disk
from workers.sandbox.boxes.limits import MB
from workers.sandbox.boxes.watchdog import Watchdog

__all__ = ["image_cache", "short_root", "site"]

isolating = pytest.mark.parametrize("kind", ISOLATING)
both = pytest.mark.parametrize("cgroups", [True, False], ids=["cgroup", "watchdog"])


async def limited(site: Site, kind: str, *, cgroups: bool = False, period: float = 0.05, **limits: int) -> Box:
    """A box of a driver that has, or has not, a cgroup for each box; its watchdog looks often."""
    driver = site.driver(kind, **limits)
    if not cgroups:
        driver._hierarchy = None  # type: ignore[attr-defined]
    elif driver._hierarchy is None:  # type: ignore[attr-defined]
        pytest.skip("this user may make no cgroups here: the watchdog's tests run")
    driver._watchdog = Watchdog(period, disk_period=0.1)  # type: ignore[attr-defined]
    return await site.box(kind, **limits)


@isolating
@both
async def test_a_memory_bomb_is_killed_and_told(site: Site, kind: str, cgroups: bool) -> None:
    box = await limited(site, kind, cgroups=cgroups, memory_mb=100)
    script = "data = []\nwhile True: data.append(bytearray(b'x') * (4 << 20))"
    small = await run(box, 'python3 -c "$1" & wait', script)
    assert small.code == 0
    # four processes that each stay below: only together are they too much
    many = "python3 -c 'import time; x = bytearray(b\"x\") * (40 << 20); time.sleep(600)' >/dev/null 2>&1 & "
    assert (await run(box, many * 4 + "wait -n; exit 0")).code == 0
    assert await until(lambda: any("memory" in note for note in box.notes)), box.notes
    assert box.alive()
    assert (await run(box, "echo ok")).text == "ok"


@isolating
async def test_a_fork_bomb_is_stopped_by_the_kernel_and_told(site: Site, kind: str) -> None:
    box = await limited(site, kind, cgroups=True, processes=60)
    script = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    bomb = asyncio.create_task(run(box, 'exec python3 -c "$1" >/dev/null 2>&1', script))
    assert await until(lambda: any("processes" in note for note in box.notes)), box.notes
    assert len(box.processes()) <= 60
    assert await until(lambda: not box.alive())  # it came again and again
    await bomb
    await box.restart()
    assert (await run(box, "echo ok")).text == "ok"


@isolating
@pytest.mark.parametrize("count", [50, 120])
async def test_too_many_processes_are_killed_and_told(site: Site, kind: str, count: int) -> None:
    """Few too many are killed but for the oldest; twice as many are taken for a bomb: all is ended at once."""
    if os.geteuid() != 0:
        pytest.skip("for a plain user the kernel counts, and refuses the first process that is too many")
    box = await limited(site, kind, cgroups=False, processes=40, period=1.0)
    many = await run(box, f"for i in $(seq {count}); do sleep 600 & done; wait; echo shell lives")
    assert await until(lambda: any("processes" in note for note in box.notes)), box.notes
    ended = count > 2 * 40
    assert many.text.endswith("shell lives") != ended
    assert await until(lambda: box.alive() != ended)
    await box.restart()
    assert (await run(box, "echo ok")).text == "ok"


FORK = """
import os, signal
made = []
try:
    while len(made) < 200:
        pid = os.fork()
        if not pid:
            signal.pause()
        made.append(pid)
except OSError:
    pass
for pid in made:
    os.kill(pid, signal.SIGKILL)
print(len(made))
"""


@isolating
@both
async def test_the_kernel_refuses_one_process_too_many(site: Site, kind: str, cgroups: bool) -> None:
    if not cgroups and os.geteuid() == 0:
        pytest.skip("root's processes are counted in cgroups alone")
    box = await limited(site, kind, cgroups=cgroups, processes=40, period=5.0)
    made = int((await run(box, 'python3 -c "$1"', FORK)).text)
    assert made == 40 - 3  # the sandbox's first process, the program that waits outside, and this Python


@isolating
async def test_a_fault_by_a_limit_names_the_limits(site: Site, kind: str) -> None:
    box = await limited(site, kind, cgroups=os.geteuid() == 0, processes=16, period=60.0)
    full = asyncio.create_task(run(box, 'exec python3 -c "$1"', FORK.replace("for pid", "signal.pause()\nfor pid")))
    assert await until(lambda: len(box.processes()) >= 13)
    with pytest.raises(SandboxError, match=r"nothing runs: .*\(limits of this sandbox: memory_mb 4096, processes 16\)"):
        while True:
            await box._run_inside(box.command(["/bin/true"]), "nothing runs")  # type: ignore[attr-defined]
    await box.kill()
    await full


@isolating
async def test_a_full_disk_is_stopped_and_told(site: Site, kind: str) -> None:
    box = await limited(site, kind, cgroups=False, disk_mb=20)
    done = await run(box, "head -c 30000000 /dev/zero > ~/one")
    assert done.code != 0
    assert (box.folder / "home" / "one").stat().st_size == 20 * MB
    await run(box, "for i in $(seq 400); do head -c 1000000 /dev/zero > ~/n$i; sleep 0.05; done", seconds=60)
    assert await until(lambda: any("disk" in note for note in box.notes)), box.notes
    assert sum(path.stat().st_size for path in (box.folder / "home").iterdir()) < 400 * MB
    assert (await run(box, "rm -f ~/n* ~/one; echo ok > ~/file; cat ~/file")).text == "ok"


SLOW_WRITER = """
import time
with open("w", "wb", buffering=0) as file:
    while True:
        file.write(bytes(100_000))
        time.sleep(0.005)
"""


@pytest.mark.parametrize("kind", ["local", *ISOLATING])
async def test_a_full_disk_spares_whoever_does_not_write(site: Site, kind: str) -> None:
    """Told once, when the limit is crossed; what goes on writing is killed, and what only runs is not."""
    box = await limited(site, kind, disk_mb=40)
    fill = "cd; fallocate -l 30000000 a; fallocate -l 30000000 b; "
    assert await run(box, fill + "sleep 1; echo slept") == (0, "slept")
    assert len(box.notes) == 1 and "nothing was killed" in box.notes.pop(), box.notes
    script = 'cd; sleep 600 & python3 -c "$1" 2>/dev/null; echo $?; kill -0 $! && echo lives; kill $!'
    assert (await run(box, script, SLOW_WRITER)).text.splitlines()[-2:] == ["137", "lives"]
    assert [note for note in box.notes if "went on writing was killed" in note] == box.notes != []
    assert await run(box, "cd; rm a b w; sleep 1; echo here > c; cat c") == (0, "here")
    box.notes.clear()
    await run(box, fill + "sleep 1")  # crossed again
    assert len(box.notes) == 1 and "limit is reached" in box.notes[0], box.notes


@pytest.mark.parametrize("kind", ["local", *ISOLATING])
async def test_files_that_do_not_fit_are_refused(site: Site, kind: str) -> None:
    with pytest.raises(HandlerError, match="`files` of 3 MB where disk_mb is 1"):
        await site.box(kind, Spec(files={"a": b"x" * (3 * MB)}, disk_mb=1))


async def test_a_disk_that_takes_long_to_count_blinds_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = asyncio.Event()

    async def slow(_: object) -> None:
        counting.set()
        await asyncio.sleep(600)

    monkeypatch.setattr(disk, "disk_use", slow)
    box = await limited(site, "bubblewrap", cgroups=False, memory_mb=100)
    await counting.wait()
    many = "python3 -c 'import time; x = bytearray(b\"x\") * (60 << 20); time.sleep(600)' >/dev/null 2>&1 & "
    await run(box, many * 2 + "wait -n; exit 0")
    assert any("memory" in note for note in box.notes)


async def test_the_watchdog_spares_the_oldest_process(site: Site) -> None:
    box = await limited(site, "bubblewrap", cgroups=False, memory_mb=100)
    hog = "python3 -c 'x = bytearray(b\"x\") * (90 << 20); import time; time.sleep(600)'"
    shell = await asyncio.create_subprocess_exec(
        *box.command(["/bin/bash", "-c", f"sleep 600 & ({hog}) & ({hog}) & wait -n; wait; echo never"]),
        env=box.environment(), cwd="/", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await until(lambda: any("memory" in note for note in box.notes))
    alive = {item.pid for item in box.processes()}
    assert shell.returncode is None
    assert len(alive) >= 3  # the shell, its sleep, and the hog that fits
    await box.restart()
    await shell.wait()


@isolating
async def test_two_boxes_know_nothing_of_each_others_memory_limit(site: Site, kind: str) -> None:
    small = await site.box(kind, Spec(memory_mb=64), name="small")
    large = await site.box(kind, name="large")
    script = "python3 -c \"x = bytearray(200 << 20); x[::4096] = b'x' * len(x[::4096]); print(len(x))\""
    assert (await run(small, script)).code != 0
    assert (await run(large, script)).text == str(200 * MB)
