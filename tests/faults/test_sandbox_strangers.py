"""Connections to a sandbox host that are cut, refused, flooded or hostile; and addresses that can't be its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.config import Config
from pipeline.errors import ConfigError, SandboxError
from tests.integration.test_sandbox_host import Served, config, served, serving
from tests.services import redis_service, session_redis
from workers.address import reachable_address
from workers.sandbox import client as client_module, server as server_module
from workers.sandbox.client import Hosts
from workers.sandbox.host import Host

__all__ = ["config", "redis_service", "served", "session_redis"]


async def test_a_full_backlog_or_table_of_files_does_not_make_a_host_dead(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await served.make()
    box = await served.open(live, "t-1")
    real, errors = client_module.Hosts._post, [errno.EAGAIN, errno.EMFILE]

    async def post(self: Hosts, *args: Any) -> bytes:
        if errors:
            number = errors.pop()
            raise client_module.aiohttp.ClientConnectorError(None, OSError(number, os.strerror(number)))  # type: ignore[arg-type]
        return await real(self, *args)

    monkeypatch.setattr(Hosts, "_post", post)
    assert (await box.bash("echo fine")).text == "fine" and not errors


async def test_strangers_hold_no_connections(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(server_module, "STRANGERS", 8)
    monkeypatch.setattr(server_module, "STRANGER_SECONDS", 1.0)
    monkeypatch.setattr(client_module, "this_machine", lambda: "elsewhere")
    async with serving(config.changed({"sandbox.listen": "127.0.0.3"})) as served:
        await served.hosts.close()
        live = await served.make()
        served.hosts = Hosts(3.0, served.queue.silent)
        port = int(live.reference["tcp"].rpartition(":")[2])
        box = await served.open(live, "t-1")
        silent, flood = [socket.create_connection(("127.0.0.3", port)) for _ in range(3)], []
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        junk = (
            b"", b"\x00" * 64, b"POST /v1/act HTTP/1.1\r\nX-Rollout-Key: " + b"k" * 100_000, b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/open HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nslow",
        )  # fmt: skip
        for number in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.3", port, ssl=context)
            writer.write(junk[number % len(junk)])
            flood.append((reader, writer))
            if number % 10 == 0:
                assert (await box.bash(f"echo {number}")).text == str(number)
        async with asyncio.timeout(10):
            for reader, _ in flood:
                try:
                    await reader.read()
                except OSError:
                    continue
            while served.host._server._strangers:  # type: ignore[union-attr]
                await asyncio.sleep(0.05)
        for _, writer in flood:
            writer.transport.abort()
        for item in silent:
            item.close()
        assert (await box.bash("echo fine")).text == "fine"
        key = box._headers["X-Rollout-Key"]
    assert key not in caplog.text and not re.search(r"\b[0-9a-f]{64}\b", caplog.text)


class Cutter:
    """Stands before a host's TCP port; cuts each connection after some bytes of the answers, more every time."""

    def __init__(self, host: str, port: int) -> None:
        self.target, self.cuts = (host, port), 0
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        there = asyncio.create_task(self._copy(reader, far_writer, 1 << 40))
        try:
            await self._copy(far_reader, writer, 1500 + 400 * self.cuts)
            self.cuts += 1
        finally:
            there.cancel()
            for item in (writer, far_writer):
                item.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        with contextlib.suppress(OSError):
            while most > 0 and (data := await reader.read(min(most, 1 << 16))):
                writer.write(data)
                await writer.drain()
                most -= len(data)


async def test_connections_that_are_cut_in_mid_call_run_nothing_twice(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "this_machine", lambda: "elsewhere")
    async with serving(config.changed({"sandbox.listen": "127.0.0.3"})) as served:
        await served.hosts.close()
        served.hosts = Hosts(3.0, served.queue.silent)
        cutter = Cutter("127.0.0.3", int(served.host.stock.address["tcp"].rpartition(":")[2]))
        served.host.stock.address["tcp"] = f"127.0.0.1:{await cutter.start()}"
        try:
            box = await served.open(await served.make(), "t-1")
            for number in range(60):
                await box.bash(f"echo {number} >> count")
            assert (await box.read("count")).decode().split() == [str(number) for number in range(60)]
            assert len(await box.read("count", 0, 100)) == 100 and cutter.cuts > 3
        finally:
            await cutter.stop()


@pytest.mark.parametrize("body", [b"\x93\x01\x02\x03", b"\x05", b"\xc1", b"\x81" * 5000, wire.pack({"name": {}}),
                                  wire.pack({"name": "g.0-nonce-0", "sandbox": [], "id": {"a": 1}, "token": None,
                                             "stage": 5, "resume": "x"})])  # fmt: skip
async def test_junk_opens_nothing(served: Served, body: bytes) -> None:
    import aiohttp

    live = await served.make()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(live.reference["uds"])) as session:
        async with session.post("http://x/v1/open", data=body) as reply:
            assert reply.status in (200, 400)
            assert b"key" not in await reply.read()


def test_an_address_that_is_everybodys_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one by which they reach this machine"):
        reachable_address(Config().changed({"sandbox.listen": "0.0.0.0"}))


async def test_an_address_of_another_machine_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"sandbox.listen = 203.0.113.7: this machine can't listen there"):
        async with serving(config.changed({"sandbox.listen": "203.0.113.7"})):
            pass


async def test_right_after_redis_was_away_no_host_counts_as_dead(served: Served) -> None:
    """Nobody could beat meanwhile: what is heard first is no proof of a death."""
    queue, now = served.queue, int((await served.queue.execute("TIME"))[0]) * 1000
    await queue.execute("ZADD", queue.key("beats"), now - 60_000, "host-1")
    await queue.tick()
    assert 50 < (await queue.silent("host-1") or 0.0) < 90
    await queue.execute("SET", queue.key("tick"), now - 30_000)  # back, and nobody has ticked yet
    assert await queue.silent("host-1") == 0.0
    await queue.tick()  # the first one to come says: for one lease more
    assert await queue.silent("host-1") == 0.0
    assert await queue.silent("nobody") is None


async def test_nobody_else_may_write_beside_a_hosts_folder(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made /tmp/rollout-sandboxes-UID first could put a socket of his own in the place of a host's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    default = config.changed({"sandbox.root": ""})
    base = tmp_path / f"rollout-sandboxes-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    host = await Host.open(default, "")
    assert base.stat().st_mode & 0o022 == 0
    await host.close()
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    (tmp_path / f"rollout-sandboxes-{stranger}").mkdir()
    with pytest.raises(SandboxError, match="of this user"):
        await Host.open(default, "")
