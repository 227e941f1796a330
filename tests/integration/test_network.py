"""The gate of a sandbox without network: real namespaces, real programs inside, nothing left when either side ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pipeline.errors import HandlerError, SandboxError
from tests.boxes import ISOLATING, Site, image_cache, run, short_root, site, until
from tests.services import require
from workers.sandbox.box import Spec
from workers.sandbox.network import gate as gates
from workers.sandbox.network.gate import Gate, open_gate

__all__ = ["image_cache", "short_root", "site"]

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Keeper:
    """A process alone in user, pid and network namespaces of its own, with the machine's programs."""

    def __init__(self) -> None:
        bwrap = [require("bwrap"), "--unshare-all", "--unshare-user", "--as-pid-1", "--ro-bind", "/", "/"]
        command = [*bwrap, "--proc", "/proc", "--dev", "/dev", "/bin/sh", "-c", "echo ready; read -r _"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        starter = self.process.pid
        self.pid = int(Path(f"/proc/{starter}/task/{starter}/children").read_text().split()[0])

    def end(self) -> None:
        self.process.communicate()

    async def run(self, *argv: str, **environment: str) -> tuple[int | None, str]:
        """Exit code and output of a program inside."""
        join = ["nsenter", "-t", str(self.pid), "-U", "-m", "-p", "-n", "--preserve-credentials", "--"]
        process = await asyncio.create_subprocess_exec(
            *join, *argv, env={"PATH": os.defpath, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = await process.communicate()
        return process.returncode, said.decode()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    require("nsenter")
    made = Keeper()
    yield made
    made.end()


@pytest.fixture
async def world() -> AsyncIterator[int]:
    """A web server outside: its port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


FETCH = """
import os, sys, urllib.error, urllib.request
os.environ["no_proxy"] = ""  # the server that stands for the world has a loopback address
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=5).read().decode())
    except OSError as error:
        print(error)
"""


async def fetch(keeper: Keeper, gate: Gate | None, *urls: str) -> list[str]:
    environment = gate.environment() if gate else {}
    _, said = await keeper.run("/usr/bin/python3", "-I", "-c", FETCH, *urls, **environment)
    return said.splitlines()


async def test_only_allowed_hosts_are_reached_from_inside(keeper: Keeper, world: int) -> None:
    before = descriptors()
    url = f"http://127.0.0.1:{world}/"
    (nothing,) = await fetch(keeper, None, url)
    assert "refused" in nothing, "the sandbox has a network without a gate: this test proves nothing"
    gate = await open_gate(keeper.pid, [f"127.0.0.1:{world}", "*.example.org"])
    reached = f"*.example.org (ports 80 and 443 only), 127.0.0.1:{world}"
    try:
        good, plain, tls = await fetch(keeper, gate, url, "http://evil.example/", "https://evil.example/")
        assert good == "hello"
        assert "403" in plain and f"evil.example:80 can't be reached from here; what can: {reached}" in plain
        assert "403" in tls and f"evil.example:443 can't be reached from here; what can: {reached}" in tls
        assert (gate.proxy.denied, gate.proxy.traffic.received) == (2, len(ANSWER))
    finally:
        await gate.close()
        await gate.close()
    assert descriptors() == before


@pytest.mark.parametrize("kind", ISOLATING)
async def test_a_task_that_names_its_hosts_reaches_them_from_a_real_box(kind: str, site: Site, world: int) -> None:
    spec = Spec.of({"network": {"allow": [f"127.0.0.1:{world}"]}, "env": {"no_proxy": ""}})
    box = await site.box(kind, spec)
    ask = f"python3 -c '{FETCH}' http://127.0.0.1:{world}/ http://evil.example/"
    for _ in range(2):
        code, said = await run(box, ask)
        assert code == 0 and said.startswith("hello\n") and "evil.example:80 can't be reached from here" in said, said
        await box.restart()
    nowhere = await site.box(kind, name="g.1-token")
    assert "hello" not in (await run(nowhere, ask)).text


async def test_the_gate_listens_inside_and_nowhere_else(keeper: Keeper) -> None:
    other = Keeper()
    try:
        gate = await open_gate(keeper.pid, ["example.org"])
        reach = f"import socket; socket.create_connection(('127.0.0.1', {gate.port}), 2)"
        assert (await keeper.run("/usr/bin/python3", "-I", "-c", reach))[0] == 0
        assert "refused" in (await other.run("/usr/bin/python3", "-I", "-c", reach))[1]
        with socket.socket() as outside:
            assert outside.connect_ex(("127.0.0.1", gate.port)) != 0
        await gate.close()
        assert "refused" in (await keeper.run("/usr/bin/python3", "-I", "-c", reach))[1]
    finally:
        other.end()


async def test_the_environment_names_the_gate_and_spares_the_sandboxs_own_servers(keeper: Keeper) -> None:
    gate = await open_gate(keeper.pid, ["example.org"])
    url = f"http://127.0.0.1:{gate.port}"
    assert gate.environment() == {
        "http_proxy": url, "https_proxy": url, "HTTP_PROXY": url, "HTTPS_PROXY": url,
        "no_proxy": "localhost,127.0.0.1,::1", "NO_PROXY": "localhost,127.0.0.1,::1",
    }  # fmt: skip
    await gate.close()


async def test_a_gate_ends_with_its_sandbox(keeper: Keeper, world: int) -> None:
    before = descriptors()
    tasks = asyncio.all_tasks()
    gate = await open_gate(keeper.pid, [f"127.0.0.1:{world}"])
    hold = f"import socket; socket.create_connection(('127.0.0.1', {gate.port})).recv(1)"
    inside = asyncio.create_task(keeper.run("/usr/bin/python3", "-I", "-c", hold))
    assert await until(lambda: bool(gate.proxy._open))
    os.kill(keeper.pid, signal.SIGKILL)
    await inside
    assert await until(lambda: not gate.proxy._open and descriptors() == before)
    assert [task.get_name() for task in asyncio.all_tasks() - tasks] == []
    await gate.close()


def inherited() -> str:
    return subprocess.check_output(["ls", "-l", "/proc/self/fd"], text=True, close_fds=False)


async def test_no_child_of_the_host_inherits_the_listener(keeper: Keeper) -> None:
    gate = await open_gate(keeper.pid, ["example.org"])
    listener = gate._server.sockets[0].fileno()
    name = os.readlink(f"/proc/self/fd/{listener}")
    assert name not in inherited()
    os.set_inheritable(listener, True)
    assert name in inherited(), "this look would have found nothing"
    await gate.close()


async def test_no_gate_where_it_would_be_open_to_the_machine() -> None:
    with pytest.raises(SandboxError, match="no network namespace of its own"):
        await open_gate(os.getpid(), ["example.org"])


async def test_failures_are_sentences_and_leave_nothing(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with pytest.raises(HandlerError, match=r"network\.allow: 'http://x'"):
        await open_gate(keeper.pid, ["http://x"])
    with monkeypatch.context() as patched:
        patched.setattr(gates, "HELPER", Path("/nonexistent/helper.py"))
        with pytest.raises(SandboxError, match="helper ended with 2: .*nonexistent"):
            await open_gate(keeper.pid, ["example.org"])
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/nonexistent")
        with pytest.raises(SandboxError, match="nsenter"):
            await open_gate(keeper.pid, ["example.org"])
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(SandboxError, match="keeper .* is gone"):
        await open_gate(ended.pid, ["example.org"])
    assert descriptors() == before


async def test_a_helper_that_hangs_is_ended(keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gates, "HELPER", helper)
    monkeypatch.setattr(gates, "HELPER_SECONDS", 0.3)
    before = descriptors()
    with pytest.raises(SandboxError, match=r"longer than 0\.3 s"):
        await open_gate(keeper.pid, ["example.org"])
    assert descriptors() == before
