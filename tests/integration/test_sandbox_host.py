"""The host and its far side: one user at a time, each action once, errors by code, TLS, and what a dead host means."""

from __future__ import annotations

import asyncio
import errno
import io
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from pipeline import wire
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.errors import SandboxError, SandboxGone
from pipeline.queue import Queue
from tests.services import RedisService
from workers.sandbox import client as client_module, replies
from workers.sandbox.client import Hosts, RemoteSandbox
from workers.sandbox.host import Host
from workers.sandbox.live import Live
from workers.sandbox.replies import KEY_HEADER, NAME_HEADER, Fenced


@dataclass
class Served:
    """A host on a real Redis, and the rollout `g.0` whose hash the tests write themselves."""

    host: Host
    queue: Queue
    hosts: Hosts

    async def make(self, token: str = "nonce-0", **spec: Any) -> Live:
        live = await self.host.stock.prepare(spec, id="g.0", token=token, lane="train")
        await self.holds(token, "init")
        return live

    async def holds(self, token: str, stage: str, live: Live | None = None) -> None:
        """The attempt with `token` holds the rollout in `stage`; its hash names `live`."""
        fields = ["token", token, "stage", stage, "state", "leased"]
        fields += ["sandbox", live.text] if live else []
        await self.queue.execute("HSET", self.queue.key("r", "g.0"), *fields)

    async def open(self, live: Live, token: str, stage: str = "run", **about: Any) -> RemoteSandbox:
        await self.holds(token, stage, live)
        return await self.hosts.open(live.reference, id="g.0", token=token, stage=stage, **about)


@pytest.fixture
def config(redis_service: RedisService) -> Iterator[Config]:
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield redis_service.config.changed({"sandbox.root": folder, "sandbox.max_live": 4, "lease.seconds": 3.0,
                                            "lease.beat": 1.0, "lease.tick": 0.5})  # fmt: skip


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Served]:
    redis = connect(config)
    queue = Queue(redis, config, patience=5.0)
    host = await Host.open(config, "host-1", queue)
    hosts = Hosts(config.lease.seconds, queue.silent)
    await queue.beat("host-1", {"stage": "init"}, [])
    made = Served(host, queue, hosts)
    try:
        yield made
    finally:
        await made.hosts.close()
        await host.close()
        await redis.aclose()


@pytest.fixture
async def served(config: Config) -> AsyncIterator[Served]:
    async with serving(config) as served:
        yield served


async def test_every_verb_and_error_reaches_the_far_side_as_itself(served: Served) -> None:
    live = await served.make(files={"a/b.txt": "one two"})
    box = await served.open(live, "t-1")
    assert (await box.bash("cat a/b.txt; exit_code() { return 3; }; exit_code")) == ("one two", 3, False)
    await box.write("x y/z\n.bin", bytes(range(256)))
    assert await box.read("x y/z\n.bin", 250, 3) == b"\xfa\xfb\xfc"
    await box.edit("a/b.txt", "two", "three")
    assert await box.read("a/b.txt") == b"one three"
    await box.upload("c", await box.download("a"))
    assert (await box.bash("find c -type f")).text.startswith("c/")
    with pytest.raises(FileNotFoundError) as missing:
        await box.read("nothing")
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="0"):
        await box.edit("a/b.txt", "four", "five")
    slow = await box.bash("sleep 60", 0.3)
    assert slow.timed_out and slow.exit_code is None


async def test_one_attempt_uses_it_and_an_older_one_is_fenced(served: Served) -> None:
    live = await served.make()
    first = await served.open(live, "t-1")
    await first.bash("echo 1 >> count")
    second = await served.open(live, "t-2", resume=True)
    with pytest.raises(Fenced):
        await first.bash("echo old >> count")
    assert (await second.bash("echo 1 >> count")).exit_code == 0  # the replayed one: its stored result
    assert (await second.bash("cat count")).text == "1"
    with pytest.raises(Fenced):  # its token is not the current one any more
        await served.hosts.open(live.reference, id="g.0", token="t-1", stage="run")


async def test_an_attempt_that_can_not_go_on_from_a_touched_sandbox_is_told_so(served: Served) -> None:
    live = await served.make()
    await (await served.open(live, "t-1")).bash("true")
    with pytest.raises(SandboxGone, match="starts over"):
        await served.open(live, "t-2")
    third = await served.open(live, "t-3", resume=True)
    with pytest.raises(SandboxGone, match="another one"):
        await third.bash("false")


async def test_a_lost_reply_runs_nothing_twice(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await served.make()
    box = await served.open(live, "t-1")
    real, lost = Hosts._post, []

    async def post(self: Hosts, *args: Any) -> bytes:
        data = await real(self, *args)
        if len(lost) < 3:
            lost.append(data)
            raise aiohttp.ServerDisconnectedError
        return data

    monkeypatch.setattr(Hosts, "_post", post)
    assert (await box.bash("echo 1 >> count; wc -l < count")).text.strip() == "1"
    assert len(lost) == 3 and len(set(lost)) == 1


async def test_an_action_goes_on_when_its_caller_dies_and_the_next_attempt_waits_for_it(served: Served) -> None:
    live = await served.make()
    first = await served.open(live, "t-1")
    first.note_turn(b"turn 1")
    call = asyncio.create_task(first.bash("echo 1 >> count; sleep 1; echo done"))
    async with asyncio.timeout(10):
        while not (live.box.folder / "home" / "count").exists():
            await asyncio.sleep(0.02)
    call.cancel()
    second = await served.open(live, "t-2", resume=True)
    assert second.turns == [b"turn 1"]
    assert (await second.bash("echo 1 >> count; sleep 1; echo done")).text == "done"
    assert (await second.bash("cat count")).text == "1"


async def test_eval_gets_a_fresh_shell_on_the_same_files(served: Served) -> None:
    live = await served.make()
    run = await served.open(live, "t-1")
    await run.bash("export X=1; cd /; echo hi > ~/f; sleep 300 &")
    scored = await served.open(live, "t-2", "eval")
    assert (await scored.bash("echo [$X] $(cat f) $(jobs | wc -l)")).text == "[] hi 0"
    with pytest.raises(Fenced):
        await run.bash("true")


async def test_what_is_not_named_any_more_goes_and_what_is_stays(served: Served) -> None:
    live = await served.make()
    await served.holds("nonce-0", "init")
    assert await served.host.look() == 0  # its INIT attempt holds the lease
    await served.holds("t-1", "run", live)
    assert await served.host.look() == 0
    await served.queue.execute("HDEL", served.queue.key("r", "g.0"), "sandbox")
    assert await served.host.look() == 1
    await served.host.stock.wait_until_empty()
    assert not live.box.folder.exists()
    with pytest.raises(SandboxGone):
        await served.hosts.open(live.reference, id="g.0", token="t-1", stage="run")


async def test_the_key_is_asked_before_the_body(served: Served) -> None:
    live = await served.make()
    box = await served.open(live, "t-1")
    right = box._headers[KEY_HEADER]
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(live.reference["uds"])) as session:
        for key in ("", "0" * 64, right[:-1], "ü" * 64):
            headers = {NAME_HEADER: live.box.name, KEY_HEADER: key}
            body = io.BytesIO(b"\x00" * (70 << 20))
            async with session.post("http://x/v1/act", data=body, headers=headers) as reply:
                with pytest.raises(Fenced):
                    replies.read_reply(await reply.read(), "bash")
        for body, status in ((b"junk", 400), (wire.pack({"n": 1}), 400), (b"", 400)):
            async with session.post("http://x/v1/act", data=body, headers=box._headers) as reply:
                assert reply.status == status
        async with session.post("http://x/v1/open", data=b"x" * 20_000) as reply:
            assert reply.status == 400
    assert (await box.bash("echo fine")).text == "fine"


async def test_from_another_machine_it_is_tls_to_the_certificate_that_was_told(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config.changed({"sandbox.listen": "127.0.0.3"})) as served:
        live = await served.make()
        monkeypatch.setattr(client_module, "this_machine", lambda: "elsewhere")
        await served.hosts.close()
        served.hosts = Hosts(3.0, served.queue.silent)
        box = await served.open(live, "t-1")
        assert box._link.url.startswith("https://127.0.0.3:")
        assert (await box.bash("echo far")).text == "far"
        forged = {**live.reference, "tls": "00" * 32}
        with pytest.raises(SandboxGone, match="another process answers"):
            await served.hosts.open(forged, id="g.0", token="t-1", stage="run")


async def test_a_host_that_is_gone_is_noticed(served: Served, config: Config) -> None:
    live = await served.make()
    box = await served.open(live, "t-1")
    await served.host.close()
    with pytest.raises(SandboxGone):
        await box.bash("true")
    silent = dict(live.reference, host="host-2", node="elsewhere", tcp="127.0.0.9:9", tls="00" * 32)
    with pytest.raises(SandboxGone):  # Redis knows no such worker
        await served.hosts.open(silent, id="g.0", token="t-1", stage="run")
    await served.queue.beat("host-2", {"stage": "init"}, [])
    began = asyncio.get_running_loop().time()
    with pytest.raises(SandboxGone):  # it beat a moment ago: it is given a lease's time
        await served.hosts.open(silent, id="g.0", token="t-1", stage="run")
    assert asyncio.get_running_loop().time() - began > 1.5


async def test_a_reply_of_an_unknown_kind_is_a_sandbox_error() -> None:
    with pytest.raises(SandboxError):
        replies.read_reply(wire.pack({"error": "os.system", "text": "x"}), "bash")
    with pytest.raises(SandboxError):
        replies.read_reply(wire.pack(["what"]), "bash")
    error = replies.read_reply
    with pytest.raises(OSError) as denied:
        error(replies.pack_error(PermissionError(errno.EACCES, "no", "/x")), "read")
    assert isinstance(denied.value, PermissionError) and denied.value.filename == "/x"
