"""From inside, trying to get out, to see others, and to outlive the sandbox."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import SandboxError
from tests.boxes import ISOLATING, Site, image_cache, run, short_root, site, until
from workers.sandbox import processes
from workers.sandbox.images import host

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


@isolating
@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
async def test_a_python_that_lies_under_tmp(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there inside; when the agent puts a link in its place, a restart makes nothing where that points."""
    with tempfile.TemporaryDirectory(prefix="box-", dir=place) as folder:
        prefix, outside = Path(folder, "deep/prefix"), Path(folder, "outside")
        prefix.mkdir(parents=True)
        outside.mkdir()
        (prefix / "file").write_text("seen")
        monkeypatch.setattr(sys, "prefix", str(prefix))
        host.digest.cache_clear()
        site = Site(Path(folder, "host"), Path(folder, "cache"))
        try:
            box = await site.box(kind)
            mode = "1777" if kind == "apptainer" else "700"
            assert await run(box, 'cat "$1/file"; stat -c %a "$2"', str(prefix), place) == (0, f"seen{mode}")
            await box.restart()
            assert (await run(box, 'cat "$1/file"; touch "$1/new"', str(prefix))).text.startswith("seen")
            target = f"/oldroot{outside}" if kind == "bubblewrap" else str(outside)  # as bwrap sees it when it mounts
            assert (await run(box, 'mv "$1" "$1.old" && ln -s "$2" "$1"', f"{folder}/deep", target)).code == 0
            with pytest.raises(SandboxError, match="must be a folder"):
                await box.restart()
            assert list(outside.iterdir()) == []
            assert [path.name for path in prefix.iterdir()] == ["file"]
        finally:
            await site.close()
            host.digest.cache_clear()


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


@isolating
async def test_the_files_of_the_first_process_count_for_its_box(site: Site, kind: str) -> None:
    """What it has open can be written to through /proc, so nothing of it may lie where nobody counts."""
    box = await site.box(kind)
    await run(box, "for file in /proc/1/fd/*; do head -c 3000000 /dev/zero > $file; done 2>/dev/null")
    open_files = [os.readlink(path) for path in Path(f"/proc/{box.pid}/fd").iterdir()]
    counted = [path for path in open_files if path.startswith("/")]
    assert all(path.startswith((str(box.folder), "/dev/null")) for path in counted), open_files
    assert (await run(box, "echo ok")).text == "ok"


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
