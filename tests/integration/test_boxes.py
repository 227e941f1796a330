"""Boxes of every driver: they start, run commands, keep files, stay apart, restart, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, HandlerError, SandboxError
from tests.boxes import ALL, ISOLATING, Site, image_cache, run, short_root, site, until
from workers.sandbox import processes, programs
from workers.sandbox.box import Allow, Spec
from workers.sandbox.boxes import aids, make_driver
from workers.sandbox.boxes.limits import MB

__all__ = ["image_cache", "short_root", "site"]


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> (mode, size, time of change in ns) of everything in a folder."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            about = os.lstat(os.path.join(base, name))
            found[os.path.join(base, name)] = about.st_mode, about.st_size, about.st_mtime_ns
    return found


@pytest.mark.parametrize("kind", ALL)
async def test_a_box_lives_restarts_and_leaves_nothing(site: Site, kind: str) -> None:
    files: dict[str, str | bytes] = {"a/b.txt": "hi\n", "c": b"\xff\x00"}
    box = await site.box(kind, Spec(files=files, workdir="a/new"))
    assert await run(box, 'cat ~/a/b.txt && wc -c < ~/c && cd "$1" && pwd', box.workdir) == (
        0, f"hi\n2\n{box.home}/a/new",
    )  # fmt: skip
    assert (await run(box, "exit 7")).code == 7
    assert (await run(box, "echo err >&2; kill -9 $$")).text == "err"
    assert box.alive()
    assert box.processes() == []
    assert box.folder.stat().st_mode & 0o777 == 0o700

    keeper = box.pid
    await run(box, "setsid sleep 600 >/dev/null 2>&1 & echo kept > ~/kept; echo x > /tmp/kept")
    assert await until(lambda: len(box.processes()) == 1)
    await box.restart()
    assert box.alive()
    assert box.processes() == []
    assert box.pid is None or box.pid != keeper
    assert (await run(box, "cat ~/kept")).text == "kept"

    await run(box, "setsid sleep 600 >/dev/null 2>&1 & mkdir -p ~/deep/er; touch ~/deep/er/x; chmod 0 ~/deep/er ~/deep")
    assert await until(lambda: len(box.processes()) == 1)
    inside = box.processes()
    await box.discard()
    await box.discard()
    assert not box.folder.exists()
    assert not box.alive()
    assert not [item for item in inside if processes.look(item.pid) == item]
    if box.pid is not None:
        with pytest.raises(SandboxError, match="restart"):
            box.command(["true"])


@pytest.mark.parametrize("kind", ALL)
async def test_the_environment_is_ours_alone(site: Site, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET_TOKEN", "APPTAINERENV_X", "SINGULARITYENV_X", "ROLLOUT_REDIS__URL", "APPTAINER_BIND"):
        monkeypatch.setenv(name, "/leaked:/leaked" if name == "APPTAINER_BIND" else "leaked")
    box = await site.box(kind, Spec(env={"ASKED": "a b\nc"}))
    output = (await run(box, 'env; echo "=$ASKED="; cat /proc/*/environ 2>/dev/null; ls -d /leaked')).text
    assert "=a b\nc=" in output
    if kind != "local":  # in a local box /proc is this machine's
        assert "leaked" not in output.replace("'/leaked'", "")
        assert "APPTAINER" not in output
        assert "SINGULARITY" not in output
        assert str(Path.home()) not in output.replace(f"HOME={box.home}", "") or str(Path.home()) == box.home
    names = set(box.environment())
    assert not names & {"SECRET_TOKEN", "X", "ROLLOUT_REDIS__URL"}
    assert {"PATH", "HOME", "LANG", "TERM", "PAGER", "GIT_PAGER"} <= names


@pytest.mark.parametrize("kind", ALL)
async def test_what_cannot_be_met_is_told(site: Site, kind: str) -> None:
    with pytest.raises(HandlerError, match="host_network"):
        await site.box(kind, Spec(network="host"))
    with pytest.raises(HandlerError, match="'A='"):
        await site.box(kind, Spec(env={"A=": "x"}))
    with pytest.raises(HandlerError, match="/no/such"):
        await site.box(kind, Spec(workdir="/no/such"))
    with pytest.raises(HandlerError, match="no-such-image"):
        await site.box(kind, Spec(image="no-such-image"))
    with pytest.raises(HandlerError, match="correct `workdir`"):
        await site.box(kind, Spec(files={"a": ""}, workdir="a/b"))
    for name in ("a/b", "x" * 300):
        with pytest.raises(HandlerError, match="correct `files`"):
            await site.box(kind, Spec(files={"a": "", name: ""}))
    assert {path.name for path in site.root.iterdir()} <= {".aids"}


async def test_a_name_is_one_box_whatever_its_characters(site: Site) -> None:
    names = ["a/b", "a b", "../x", "ü\n", "x" * 400, ".", "\udc80"]
    boxes = [await site.box("local", name=name) for name in names]
    assert len({box.folder for box in boxes}) == len(names)
    assert all(box.folder.parent == site.root for box in boxes)


DEEP = """
import os
os.mkdir("deep")
at = os.open("deep", os.O_RDONLY)
for _ in range(1500):
    os.mkdir("d", dir_fd=at)
    below = os.open("d", os.O_RDONLY, dir_fd=at)
    os.close(at)
    at = below
os.fchmod(at, 0)
"""


async def test_folders_deeper_than_pythons_stack_are_removed(site: Site) -> None:
    box = await site.box("bubblewrap")
    assert await run(box, 'cd; python3 -c "$1"', DEEP) == (0, "")
    await box.discard()
    assert not box.folder.exists()


@pytest.mark.parametrize("kind", ISOLATING)
async def test_what_runs_with_all_rights_loads_no_file_of_the_agents(site: Site, kind: str) -> None:
    names = (await run(await site.box(kind, name="other"), "cd /.rollout; ls")).text.split()
    files: dict[str, str | bytes] = {f"lib/{name}": "no library" for name in names if ".so" in name}
    home = "/root" if kind == "apptainer" else "/home/agent"
    env = {"LD_LIBRARY_PATH": f"{home}/lib", "LD_PRELOAD": f"{home}/lib/libc.so.6", "LD_AUDIT": f"{home}/lib/libc.so.6"}
    box = await site.box(kind, Spec(files=files, env=env))
    assert files and set(box.environment()) & set(env) == {"LD_LIBRARY_PATH"}
    command = box.command([*aids.call("setpriv"), "--version"])  # that has its own libraries, as what comes before it
    code, said = await programs.run(command, seconds=15.0, env=box.environment())
    assert code == 0, said


async def test_a_restart_makes_no_folders_where_the_agent_put_links(site: Site, short_root: Path) -> None:
    box = await site.box("apptainer")
    deep = [path for path in (box.folder / "home").iterdir() if any(path.iterdir())]
    if not deep:
        pytest.skip("this Python lies outside of /root, so nothing is bound in the home")
    outside = short_root / "outside"
    outside.mkdir()
    for path in deep:  # a folder that holds a mount point may still be renamed
        assert (await run(box, f"mv ~/{path.name} ~/old && ln -s {outside} ~/{path.name}")).code == 0
    with contextlib.suppress(SandboxError):
        await box.restart()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("kind", ALL)
async def test_the_same_name_again_starts_from_nothing(site: Site, kind: str) -> None:
    first = await site.box(kind)
    await run(first, "echo old > ~/old; setsid sleep 600 >/dev/null 2>&1 &")
    assert await until(lambda: len(first.processes()) == 1)
    old = first.processes()
    second = await site.box(kind)
    assert (await run(second, "ls -A ~ | grep old")).text == ""
    assert not [item for item in old if processes.look(item.pid) == item]


async def test_a_root_that_others_may_write_is_refused(short_root: Path) -> None:
    from pipeline.config import Config

    open_root = short_root / "open"
    open_root.mkdir()
    open_root.chmod(0o777)
    with pytest.raises(SandboxError, match="this user alone"):
        make_driver(Config(), open_root)
    with pytest.raises(SandboxError, match="too long"):
        await make_driver(Config(), short_root / ("x" * 90)).create(Spec(), "n")
    with pytest.raises(ConfigError):
        Config().changed({"sandbox.driver": "docker"})


async def test_local_says_that_it_isolates_nothing(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sandbox.boxes.local._warned", False)
    with caplog.at_level(logging.WARNING):
        await site.box("local", name="one")
        await site.box("local", name="two")
    assert [record.message for record in caplog.records if "isolates NOTHING" in record.message] != []
    assert caplog.text.count("isolates NOTHING") == 1


@pytest.mark.parametrize("kind", ISOLATING)
async def test_h16_two_boxes_share_nothing_and_have_room(site: Site, kind: str) -> None:
    one, two = await asyncio.gather(site.box(kind, name="one"), site.box(kind, name="two"))
    await run(one, f"echo x > /tmp/flag_h16; echo x > ~/flag_h16; touch {one.sockets_inside}/flag_h16")
    assert "flag_h16" not in (await run(two, f"find / -xdev -name flag_h16 2>/dev/null; ls {two.sockets_inside}")).text
    assert not Path("/tmp/flag_h16").exists()
    assert not Path("~/flag_h16").expanduser().exists()
    assert (one.sockets / "flag_h16").exists()
    folder = one.home if kind == "bubblewrap" else "/opt/repository"
    for place in ("/tmp", "/var/tmp", folder, "/dev/shm"):
        done = await run(one, 'mkdir -p "$1" && head -c 104857600 /dev/zero > "$1/big" && wc -c < "$1/big"', place)
        assert done == (0, "104857600"), place
    script = "exec python3 -c \"import socket; socket.create_server(('127.0.0.1', 8000)); print('bound')\""
    assert await asyncio.gather(run(one, script), run(two, script)) == [(0, "bound"), (0, "bound")]


@pytest.mark.parametrize("kind", ["apptainer", "apptainer-instance"])
async def test_the_image_is_never_written(site: Site, image_cache: Path, kind: str) -> None:
    box = await site.box(kind)
    before = snapshot(image_cache / "images")
    assert before
    script = "echo x > /etc/passwd && rm /etc/hosts.x 2>/dev/null; mkdir /new && echo x > /etc/new && rm /etc/group"
    assert (await run(box, script)).code == 0
    assert (await run(box, "cat /etc/passwd /etc/new; ls /etc/group")).text.startswith("x\nx\n")
    await box.restart()
    assert (await run(box, "cat /etc/passwd")).text == "x"
    assert snapshot(image_cache / "images") == before
    other = await site.box(kind, name="other")
    assert (await run(other, "ls -d /new; grep -c root /etc/passwd")).text.endswith("1")


@pytest.mark.parametrize("kind", ISOLATING)
async def test_this_python_can_be_started_inside(site: Site, kind: str) -> None:
    box = await site.box(kind)
    done = await run(box, 'exec "$1" -c "import ssl, sys; print(sys.prefix)"', sys.executable)
    assert done == (0, sys.prefix)


@pytest.mark.parametrize("kind", ISOLATING)
async def test_a_task_may_lower_limits_not_raise_them(site: Site, kind: str) -> None:
    box = await site.box(kind, Spec(memory_mb=64, processes=10**6, disk_mb=32), memory_mb=128, processes=50)
    limits = box.limits  # type: ignore[attr-defined]
    assert (limits.memory, limits.processes, limits.disk) == (64 * MB, 50, 32 * MB)
    assert (await run(box, "head -c 50000000 /dev/zero > ~/big; echo $?; wc -c < ~/big")).text.endswith(str(32 * MB))


@pytest.mark.parametrize("kind", ISOLATING)
async def test_starts_overlap_and_a_cancelled_one_leaves_nothing(site: Site, kind: str) -> None:
    boxes = await asyncio.gather(*(site.box(kind, name=str(number)) for number in range(6)))
    assert len({box.pid for box in boxes}) == 6
    for turns in (1, 3, 10, 30, 100, 300):
        start = asyncio.create_task(site.box(kind, name="cancelled"))
        for _ in range(turns):
            await asyncio.sleep(0.0001)
        start.cancel()
        for ended in await asyncio.gather(start, return_exceptions=True):
            if isinstance(ended, BaseException):
                assert isinstance(ended, asyncio.CancelledError), ended
            else:
                await ended.discard()
        assert len([path for path in site.root.iterdir() if (path / "name").exists()]) == 6
    assert all(box.alive() for box in boxes)


ASK_PROXY = """
import os, socket, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["http_proxy"])
with socket.create_connection((proxy.hostname, proxy.port)) as line:
    line.sendall(b"CONNECT other.invalid:443 HTTP/1.1\\r\\nHost: other.invalid:443\\r\\n\\r\\n")
    print(line.recv(99).split()[1].decode())
"""


@pytest.mark.parametrize("kind", ISOLATING)
async def test_chosen_hosts_come_by_a_proxy_that_outlives_a_restart(site: Site, kind: str) -> None:
    box = await site.box(kind, Spec(network=Allow(allow=["example.invalid"])))
    assert (await run(box, 'python3 -c "$1"', ASK_PROXY)).text == "403"
    await box.restart()
    assert (await run(box, 'python3 -c "$1"', ASK_PROXY)).text == "403"


@pytest.mark.parametrize("kind", ISOLATING)
async def test_a_site_may_give_its_own_network(site: Site, kind: str) -> None:
    box = await site.box(kind, Spec(network="host"), host_network=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2); print('reached')"
        )
        assert (await run(box, 'python3 -c "$1"', script)).text == "reached"


async def test_an_image_without_bash_is_told(site: Site, tmp_path: Path) -> None:
    image = tmp_path / "image"
    for name in ("bin", "dev", "etc", "proc", "root", "tmp", "var/tmp", "run/rollout"):
        (image / name).mkdir(parents=True)
    with pytest.raises(HandlerError, match="no /bin/bash"):
        await site.box("apptainer", Spec(image=str(image)))


async def test_a_start_that_takes_too_long_is_given_up(site: Site) -> None:
    with pytest.raises(SandboxError, match=r"not ready within 0\.001 s"):
        await site.box("bubblewrap", start_timeout=0.001)
    assert [path for path in site.root.iterdir() if not path.name.startswith(".")] == []
