"""From inside, trying to get out, to see others, and to use more than the sandbox may."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boxes import ISOLATING, Site, image_cache, run, short_root, site, until
from workers.sandbox import processes
from workers.sandbox.box import Box, Spec
from workers.sandbox.boxes.limits import MB
from workers.sandbox.boxes.watchdog import Watchdog

__all__ = ["image_cache", "short_root", "site"]

isolating = pytest.mark.parametrize("kind", ISOLATING)


@pytest.fixture
def listener() -> Iterator[int]:
    """A web server of this machine on 127.0.0.1; its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


CONNECT = """
import socket, sys
for place in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection(place, 2).close()
        print("reached", place)
    except OSError as error:
        print("refused")
"""


@isolating
async def test_there_is_no_network(site: Site, kind: str, listener: int) -> None:
    box = await site.box(kind)
    assert (await run(box, 'python3 -c "$1" "$2"', CONNECT, str(listener))).text == "refused\nrefused\nrefused"
    names = (await run(box, "cat /proc/net/dev | tail -n +3 | cut -d: -f1")).text.split()
    assert names == ["lo"]


@isolating
async def test_abstract_and_filed_sockets_of_this_machine_are_not_reached(
    site: Site, kind: str, short_root: Path
) -> None:
    box = await site.box(kind)
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); print(s.connect_ex(sys.argv[1].replace('@', '\\0')))"
    )
    with socket.socket(socket.AF_UNIX) as filed, socket.socket(socket.AF_UNIX) as abstract:
        filed.bind(str(short_root / "s"))
        filed.listen()
        abstract.bind(f"\0box-test-{os.getpid()}")
        abstract.listen()
        for place in (str(short_root / "s"), f"@box-test-{os.getpid()}"):
            done = await run(box, 'python3 -c "$1" "$2"', script, place)
            assert done.code == 0
            assert done.text != "0", place


@isolating
async def test_no_file_of_this_machine_or_of_a_sibling_is_seen(site: Site, kind: str, short_root: Path) -> None:
    box, sibling = await asyncio.gather(site.box(kind, name="a"), site.box(kind, name="b"))
    secret = short_root / "secret"
    secret.write_text("secret")
    for path in (secret, sibling.folder, Path("/etc/shadow"), Path("/var/log"), site.root, Path(__file__)):
        for place in (str(path), f"/proc/1/root{path}", f"/proc/1/cwd{path}", f"../../../../..{path}"):
            output = (await run(box, 'cat "$1" 2>/dev/null | head -c 20; ls -A "$1" 2>/dev/null', place)).text
            assert output in ("", "apt"), place  # an image may have a /var/log of its own
    assert (await run(box, "ls /proc/1/fd/ /proc/1/root/home /proc/1/cwd 2>&1; readlink /proc/1/cwd")).text.count(
        str(short_root)
    ) == 0


@isolating
async def test_no_process_of_this_machine_is_seen_or_signalled(site: Site, kind: str) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        box, sibling = await asyncio.gather(site.box(kind, name="a"), site.box(kind, name="b"))
        await run(sibling, "setsid sleep 601 >/dev/null 2>&1 &")
        assert await until(lambda: len(sibling.processes()) == 1)
        seen = (await run(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text
        assert "sleep 60" not in seen
        assert "pytest" not in seen
        pids = [bystander.pid, os.getpid(), sibling.processes()[0].pid, sibling.pid]
        await run(box, 'kill -9 "$@"; kill -9 -1', *map(str, pids))
        await run(box, "kill -9 1; kill -STOP 1; kill -TERM 1")
        assert bystander.poll() is None
        assert len(sibling.processes()) == 1
        assert box.alive()
        assert (await run(box, "echo ok")).text == "ok"
    finally:
        bystander.kill()
        bystander.wait()


ESCAPES = [
    "mount -o remount,bind,rw /usr && touch /usr/escaped",
    "umount -l /usr && ls /usr",
    "umount -l /proc/sys; mount -o remount,rw,bind /proc/sys && echo 1 > /proc/sys/kernel/panic",
    "echo escaped > /proc/sys/kernel/core_pattern",
    "echo b > /proc/sysrq-trigger",
    "mount -t tmpfs none /mnt || mount -t sysfs none /mnt",
    "unshare -U -r -m sh -c 'mount -o remount,bind,rw /usr && touch /usr/escaped'",
    "unshare -U -r -m sh -c 'umount -l /usr && ls /usr'",
    "unshare -U -r -m sh -c 'umount /proc/sys && echo escaped > /proc/sys/kernel/core_pattern'",
    "nsenter -t 1 -U -m -p true && nsenter -t 1 -U -m mount -o remount,bind,rw /usr",
    "mknod /tmp/disk b 254 0 && head -c 1 /tmp/disk",
    "swapon /dev/vda || insmod /x.ko || reboot -f || date -s 2000-01-01",
    "echo x > /proc/1/fd/0",
    "cat /proc/1/mem",
    "hostname escaped",
    "mkdir /sys/fs/cgroup/memory/x || mkdir /sys/fs/cgroup/x",
    "head -c 1 /dev/kmsg",
]


@isolating
@pytest.mark.parametrize("script", ESCAPES)
async def test_root_inside_cannot_get_out(site: Site, kind: str, script: str) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    box = await site.box(kind)
    done = await run(box, script, seconds=10)
    assert done.code != 0, done.text
    assert not Path("/usr/escaped").exists()
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern
    assert box.alive()


TRACE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
print([libc.ptrace(16, int(pid), 0, 0) == 0 for pid in sys.argv[1:]])
"""


@isolating
async def test_ptrace_of_what_is_outside_fails(site: Site, kind: str) -> None:
    box = await site.box(kind)
    done = await run(box, 'python3 -c "$1" "$2" "$3"', TRACE, str(os.getpid()), str(os.getppid()))
    assert done.text == "[False, False]"


@isolating
async def test_a_keeper_that_is_held_up_ends_with_its_box_all_the_same(site: Site, kind: str) -> None:
    box = await site.box(kind)
    await run(box, 'python3 -c "$1" 1', TRACE)
    await box.discard()
    assert not box.folder.exists()


async def limited(site: Site, kind: str, *, cgroups: bool, period: float = 0.05, **limits: int) -> Box:
    """A box of a driver that has, or has not, a cgroup for each box; its watchdog looks often."""
    driver = site.driver(kind, **limits)
    if not cgroups:
        driver._hierarchy = None  # type: ignore[attr-defined]
    elif driver._hierarchy is None:  # type: ignore[attr-defined]
        pytest.skip("this user may make no cgroups here: the watchdog's tests run")
    driver._watchdog = Watchdog(period, disk_period=0.1)  # type: ignore[attr-defined]
    return await site.box(kind, **limits)


both = pytest.mark.parametrize("cgroups", [True, False], ids=["cgroup", "watchdog"])


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
    assert 20 < made < 40


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


@isolating
async def test_no_process_outlives_its_sandbox(site: Site, kind: str) -> None:
    box = await site.box(kind)
    await run(
        box,
        "exec >/dev/null 2>&1; for i in 1 2 3; do setsid nohup sleep 600 & done; (trap '' TERM INT HUP; sleep 600) &",
    )
    await run(box, "unshare -U -p -f setsid sleep 600 >/dev/null 2>&1 &")
    assert await until(lambda: len(box.processes()) >= 5)
    inside = box.processes()
    await box.discard()
    assert not [item for item in inside if processes.look(item.pid) == item]
