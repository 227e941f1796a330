"""The sandbox's proxy: which hosts and addresses it lets through, and what it makes of hostile requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pipeline.errors import HandlerError
from workers.sandbox.network.allowed import Allowed, Target, target_of
from workers.sandbox.network.proxy import Limits, Proxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
QUICK = Limits(head=0.3, connect=2.0, idle=0.5, connections=4, head_bytes=2048)


@pytest.mark.parametrize(
    ("patterns", "authority", "permitted"),
    [
        (["example.org"], "example.org:443", True),
        (["example.org"], "example.org:80", True),
        (["example.org"], "example.org:8443", False),
        (["example.org"], "EXAMPLE.Org.:443", True),
        (["Example.ORG."], "example.org:443", True),
        (["example.org"], "www.example.org:443", False),
        (["example.org"], "badexample.org:443", False),
        (["example.org"], "example.org.evil.net:443", False),
        (["*.example.org"], "a.b.example.org:443", True),
        (["*.example.org"], "example.org:443", False),
        (["*.example.org"], "badexample.org:443", False),
        (["example.org:8443"], "example.org:8443", True),
        (["example.org:8443"], "example.org:443", False),
        (["bücher.example"], "xn--bcher-kva.example:443", True),
        (["*.bücher.example"], "x.XN--BCHER-KVA.example:443", True),
        (["10.0.0.5:8080"], "10.0.0.5:8080", True),
        (["10.0.0.5:8080"], "[::ffff:10.0.0.5]:8080", True),
        (["[2001:DB8:0::1]:80"], "[2001:db8::1]:80", True),
        (["a.example"], "10.0.0.5:80", False),
        ([], "example.org:443", False),
    ],
)
def test_patterns(patterns: list[str], authority: str, permitted: bool) -> None:
    assert Allowed(patterns).permits(target_of(authority)) is permitted


@pytest.mark.parametrize(
    "text",
    ["", "*", "*.", "*.*.org", "a.*.org", "http://example.org", "example.org/", "u@example.org", "a b.org", "-a.org",
     "example.org:0", "example.org:99999", "example.org:x", "*.10.0.0.5", "::1", "0x7f.1", "127.1", "2130706433",
     "010.0.0.1", "a..org", "example.org#x", "a\r\nb.org", "x" * 64 + ".org"],
)  # fmt: skip
def test_a_pattern_that_can_not_be_read_is_named(text: str) -> None:
    with pytest.raises(HandlerError, match=r"network\.allow") as error:
        Allowed(["example.org", text])
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False),
        ("127.200.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%lo", False),
        ("fd00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:7f00:1::", False),
    ],
)
def test_only_public_addresses_are_reached(address: str, reached: bool) -> None:
    assert Allowed(["example.org"]).reaches(address, 443) is reached


def test_what_is_allowed_is_told_with_its_ports() -> None:
    assert str(Allowed(["a.example", "b.example:8080", "*.c.example"])) == (
        "a.example, *.c.example (ports 80 and 443 only), b.example:8080"
    )
    assert str(Allowed([])) == "nothing"


def test_an_address_that_is_named_is_reached_on_its_port_only() -> None:
    allowed = Allowed(["169.254.169.254:8080", "[fd00::1]"])
    assert allowed.reaches("169.254.169.254", 8080)
    assert not allowed.reaches("169.254.169.254", 80)
    assert allowed.reaches("fd00:0::1", 443)
    assert not allowed.reaches("fd00::2", 443)


def test_this_machines_own_public_address_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Allowed([]).reaches("93.184.215.14", 443)
    monkeypatch.setattr("workers.sandbox.network.allowed._own_addresses", lambda: {"93.184.215.14"})
    assert not Allowed([]).reaches("93.184.215.14", 443)


class Server:
    """A server that records what it was asked. It answers each request with `answer` and closes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in head:
                head += await reader.readuntil(b"0\r\n\r\n")
            elif b"content-length: " in head:
                head += await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
            self.asked.append(head)
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening(handle: Callable[..., Any]) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def proxied(
    handle: Callable[..., Any], *allow: str, limits: Limits = QUICK
) -> AsyncIterator[tuple[Proxy, int, int]]:
    """A server behind a proxy: the proxy, its port, the server's. `{}` in a pattern is the server's port."""
    before = asyncio.all_tasks()
    async with listening(handle) as port:
        patterns = [text.format(port) for text in allow or ("127.0.0.1:{}",)]
        proxy = Proxy(Allowed(patterns), limits)
        async with listening(proxy.accept) as at:
            try:
                yield proxy, at, port
            finally:
                await proxy.close()
    assert not [task for task in asyncio.all_tasks() - before if task.get_name() == "sandbox proxy"]


async def say(port: int, data: bytes) -> bytes:
    """All that comes back until the proxy closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(4):
            return await reader.read()
    finally:
        writer.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_a_request_is_written_anew_with_the_targets_host() -> None:
    server = Server(OK)
    async with proxied(server.handle) as (proxy, at, port):
        target = b"http://127.0.0.1:%d/a?b=%%0d%%0aX" % port
        answer = await say(
            at,
            b"GET " + target + b" HTTP/1.1\r\nHost: evil.example\r\nProxy-Authorization: secret\r\nX-Kept: 1\r\n"
            b"X-Named: 2\r\nConnection: close, x-named\r\n\r\n",
        )
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"ok")
    (asked,) = server.asked
    assert asked.startswith(b"GET /a?b=%%0d%%0aX HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n" % port)
    assert b"x-kept: 1" in asked
    assert b"evil" not in asked and b"secret" not in asked and b"x-named" not in asked.lower()
    assert proxy.traffic.sent == len(asked) and proxy.traffic.received == len(OK)


async def test_each_request_of_a_connection_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = Server(OK)
    async with proxied(server.handle) as (proxy, at, port):
        good = b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % port
        answer = await say(at, good + good + b"GET http://evil.example/ HTTP/1.1\r\nHost: x\r\n\r\n" + good)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    refusal = f"HTTP/1.1 403 evil.example:80 can't be reached from here; what can: 127.0.0.1:{port}\r\n"
    assert answer.count(refusal.encode()) == 1
    assert b"task" not in answer and "its task allows that by `network: {allow: ['evil.example']}`" in caplog.text
    assert len(server.asked) == 2 and proxy.denied == 1


async def test_bodies_go_both_ways_and_chunks_are_framed_anew() -> None:
    server = Server(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 99\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    )
    async with proxied(server.handle) as (_, at, port):
        url = b"http://127.0.0.1:%d/" % port
        chunked = b"POST " + url + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        sized = b"PUT " + url + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
        answer = await say(at, chunked + sized)
    assert answer.count(b"5\r\nhello\r\n0\r\n") == 2 and b"Content-Length" not in answer
    assert [asked.count(b"abc") for asked in server.asked] == [1, 1]


async def test_expect_100_is_answered_here() -> None:
    server = Server(OK)
    async with proxied(server.handle) as (_, at, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", at)
        head = b"POST http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        writer.write(head % port)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"abc")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()
    assert b"expect" not in server.asked[0]


async def test_head_and_http_1_0() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    async with proxied(server.handle) as (_, at, port):
        head = b"HEAD http://127.0.0.1:%d/ HTTP/1.0\r\n\r\n" % port
        answer = await say(at, head)
        assert b"200 OK" in answer and answer.endswith(b"\r\n\r\n") and b"content-length: 5" in answer
        refused = await say(at, b"HEAD http://evil.example/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 403 " in refused and refused.endswith(b"\r\n\r\n")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_tunnel_carries_bytes_that_came_with_the_request() -> None:
    async with proxied(echo) as (proxy, at, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", at)
        writer.write(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\nearly " % port)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        blob = bytes(range(256)) * 4000
        writer.write(blob)
        writer.write_eof()
        async with asyncio.timeout(4):
            assert await reader.read() == b"early " + blob
        writer.close()
        assert proxy.traffic.sent == proxy.traffic.received == len(blob) + 6


@pytest.mark.parametrize(
    ("request_", "status", "word"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"a proxy takes"),
        (b"GET https://ok.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"CONNECT for https"),
        (b"GET ftp://ok.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"a proxy takes"),
        (b"GET http://me:pw@ok.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"user and password"),
        (b"GET http://ok.example@evil.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"user and password"),
        (b"GET http://ok.example/#f HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"fragment"),
        (b"GET http://ok.example#@evil.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"fragment"),
        (b"GET http://ok.example\\.evil.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"no host name has"),
        (b"GET http://ok%2eexample/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"no host name has"),
        (b"GET http:///x HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"no `host`"),
        (b"GET http://0x7f.1/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"unusual form"),
        (b"GET http://2130706433/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"unusual form"),
        (b"GET http://ok.example:99999/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"no port"),
        (b"GET http://ok.example:80:443/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"no `host`"),
        (b"GET http://OK.Example.:22/ HTTP/1.1\r\nHost: x\r\n\r\n", 403, b"ok.example:22"),
        (b"CONNECT ok.example HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"port is missing"),
        (b"CONNECT ok.example:22 HTTP/1.1\r\nHost: x\r\n\r\n", 403, b"ok.example:22 can't be reached from here"),
        (b"CONNECT [::1]:443 HTTP/1.1\r\nHost: x\r\n\r\n", 403, b"[::1]:443"),
        (b"CONNECT [::ffff:7f00:1]:443 HTTP/1.1\r\nHost: x\r\n\r\n", 403, b"127.0.0.1:443"),
        (b"CONNECT http://ok.example:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"no `host`"),
        (b"POST http://ok.example/ HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400,
         b"contradict"),
        (b"POST http://ok.example/ HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400,
         b"conflicting"),
        (b"POST http://ok.example/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501, b"ransfer"),
        (b"GET http://ok.example/ HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, b"Host"),
        (b"GET http://ok.example/ HTTP/1.1\r\n\r\n", 400, b"Host"),
        (b"GET http://ok.example/ HTTP/1.1\r\nHost : x\r\n\r\n", 400, b"illegal"),
        (b"GET http://ok.example/\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"illegal"),
        (b"GET http://ok.example/ x HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"illegal"),
        (b"GET http://ok.example/ HTTP/1.1\r\nHost: x\r\nX: a\rInjected: b\r\n\r\n", 400, b"illegal"),
        (b"GET http://ok.example/ HTTP/1.1\r\nX: " + b"y" * 4000, 431, b"too long"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, b"illegal"),
    ],
)  # fmt: skip
async def test_hostile_requests_are_refused_with_a_sentence(request_: bytes, status: int, word: bytes) -> None:
    server = Server(OK)
    async with proxied(server.handle, "ok.example", "*.ok.example") as (_, at, _port):
        answer = await say(at, request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert word in body, body
    assert head.splitlines()[0].split(b" ", 2)[2] == body.strip()
    assert server.asked == []


async def test_a_name_that_points_to_a_private_address_is_refused() -> None:
    server = Server(OK)
    async with proxied(server.handle, "localhost:{}") as (proxy, at, port):
        answer = await say(at, b"CONNECT localhost:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
        assert proxy.denied == 1
    assert b" 403 localhost can't be reached from here: its addresses are not public (" in answer
    assert server.asked == []


async def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may answer the second question otherwise: there is none."""
    server = Server(OK)
    questions: list[str] = []

    def answers(host: str, port: int, **_: Any) -> list[Any]:
        questions.append(host)
        return [(2, 1, 6, "", ("127.0.0.1" if len(questions) == 1 else "127.0.0.2", port))]

    async with proxied(server.handle, "rebind.example:{0}", "127.0.0.1:{0}") as (_, at, port):
        monkeypatch.setattr("workers.sandbox.network.proxy.socket.getaddrinfo", answers)
        url = b"http://rebind.example:%d/" % port
        good = await say(at, b"GET " + url + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        bad = await say(at, b"GET " + url + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in good and b" 403 " in bad
    assert questions.count("rebind.example") == 2


async def test_servers_that_fail_are_named() -> None:
    async with proxied(Server(b"").handle, "127.0.0.1:1", "127.0.0.1:{}", "none.invalid") as (_, at, port):
        unreachable = await say(at, b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\n\r\n")
        silent = await say(at, b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % port)
        unknown = await say(at, b"GET http://none.invalid/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 502 127.0.0.1:1 can't be reached" in unreachable
    assert b" 502 " in silent and b"without an answer" in silent
    assert b" 502 none.invalid has no address here" in unknown


@pytest.mark.parametrize(
    "answer",
    [b"garbage\r\n\r\n", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nX" + b"y" * 4000],
)
async def test_a_server_that_breaks_http_is_a_502(answer: bytes) -> None:
    async with proxied(Server(answer).handle) as (_, at, port):
        assert b" 502 " in await say(at, b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % port)


async def test_a_body_that_breaks_off_ends_the_connection() -> None:
    async with proxied(Server(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf").handle) as (_, at, port):
        answer = await say(at, b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % port)
    assert answer.endswith(b"half") and answer.count(b"HTTP/1.1") == 1


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_time_limits() -> None:
    async with proxied(silence) as (_, at, port):
        assert await say(at, b"") == b""
        assert b" 408 " in await say(at, b"GET http://127")
        tunnel = await say(at, b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
        assert tunnel == b"HTTP/1.1 200 Connection established\r\n\r\n"
        assert b" 502 " in await say(at, b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % port)


async def test_more_connections_than_the_limit_are_told() -> None:
    async with proxied(silence) as (_, at, port):
        held: list[Streams] = []
        for _ in range(QUICK.connections):
            reader, writer = await asyncio.open_connection("127.0.0.1", at)
            writer.write(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
            await reader.readuntil(b"\r\n\r\n")
            held.append((reader, writer))
        for _ in range(QUICK.connections):
            reader, writer = await asyncio.open_connection("127.0.0.1", at)
            assert b" 503 4 connections are open already" in await reader.readuntil(b"\r\n\r\n")
            held.append((reader, writer))
        assert await refused_or_empty(at), "one that is told why costs a file as well: their number is bounded too"
        for _, writer in held:
            writer.close()


async def test_close_ends_open_tunnels_at_once() -> None:
    limits = Limits()
    async with proxied(silence, limits=limits) as (proxy, at, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", at)
        writer.write(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port)
        await reader.readuntil(b"\r\n\r\n")
        await proxy.close()
        async with asyncio.timeout(1):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert await refused_or_empty(at)
        writer.close()


async def refused_or_empty(port: int) -> bool:
    """A connection that came while the proxy closed is dropped."""
    try:
        return await say(port, b"") == b""
    except ConnectionError:
        return True


def test_targets_are_written_so_that_they_can_be_read() -> None:
    assert str(Target("::1", 443)) == "[::1]:443"
    assert target_of("[::1]:443") == Target("::1", 443)
