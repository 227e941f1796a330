"""Payloads and tasks in files: where they go, how they are found, when they end, and what a folder in trouble does."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from redis.exceptions import OutOfMemoryError

from pipeline import letters, payload_files, payload_verbs, reading
from pipeline.audit import audit
from pipeline.builder import TrajectoryBuilder
from pipeline.config import Config
from pipeline.envelope import SCHEMA, Payload, encode_compressed
from pipeline.errors import (
    ConfigError,
    EnvelopeError,
    MemoryHigh,
    PayloadFilesAway,
    PayloadFolderAway,
    QueueFull,
    TaskError,
)
from pipeline.leases import Claim
from pipeline.payload_files import MAGIC, PayloadFiles, Reference, reference_in
from pipeline.payload_sweep import sweep
from pipeline.queue import Queue
from tests import line

LARGE = os.urandom(1000)
SMALL = b"small"
MOST = 500


def configured(folder: Path, **changes: Any) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return Config().changed({"payload.dir": str(folder), "payload.inline_max": MOST, **named})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shared folder."""
    made = tmp_path / "shared"
    made.mkdir()
    return made


@pytest.fixture
async def queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Queue]:
    """A line that keeps what is above MOST bytes in files, and looks for a missing one for a tenth of a second."""
    monkeypatch.setattr(payload_verbs, "SEEN", 0.1)

    async def info(section: str) -> dict[str, Any]:  # fakeredis does not know this command
        return {"run_id": "one", "used_memory": 0}

    async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(), protocol=2) as client:
        monkeypatch.setattr(client, "info", info)
        yield Queue(client, configured(folder))


def other(queue: Queue, config: Config) -> Queue:
    """Another process of the same line."""
    return Queue(queue.redis, config)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def age(folder: Path, seconds: float = 10 * 3600.0) -> None:
    """Make all files older."""
    for path in files(folder):
        about = path.stat()
        os.utime(path, (about.st_atime - seconds, about.st_mtime - seconds))


async def put(queue: Queue, group: str = "g", samples: int = 1, task: bytes = LARGE, **about: Any) -> int:
    """Enqueue rollouts whose task is these bytes."""
    ids = [f"{group}.{sample}" for sample in range(samples)]
    return await queue.enqueue(group, task, [(id, b"envelope") for id in ids], samples=samples, **about)


async def emptied(queue: Queue) -> int:
    """The trash, some seconds later; how many files were in it."""
    return await queue.remove_due(kept=0.0)


async def claimed(queue: Queue, stage: str = "init", group: str = "g") -> Claim:
    """A claim of a rollout whose task is small."""
    await put(queue, group, task=SMALL)
    for before in ("init", "run")[: ("init", "run", "eval").index(stage)]:
        assert await line.pass_on(queue, await line.one(queue, before), before) == "OK"
    return await line.one(queue, stage)


async def written(queue: Queue, claim: Claim, data: bytes = LARGE, stage: str = "init") -> None:
    await queue.write_payload(claim.id, claim.token, data, 60)
    assert await line.pass_on(queue, claim, stage, written=True) == "OK"


# -- where it goes -----------------------------------------------------------------------------------------------------


async def test_what_is_above_the_mark_lies_in_a_file_and_the_key_names_it(queue: Queue, folder: Path) -> None:
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    (path,) = files(folder)
    key = queue.key("p", claim.id, claim.token)
    reference = reference_in(await queue.execute("GET", key))
    assert reference is not None and folder / reference.path == path and reference.size == len(LARGE)
    assert path.read_bytes() == LARGE and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.parent.parent.name.startswith("rollout-") and 0 < await queue.execute("TTL", key) <= 60
    assert await queue.read_payload(claim.id, claim.token) == LARGE


async def test_a_file_is_flushed_before_it_has_its_name_and_its_folder_after(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.check_files()
    steps: list[str] = []
    flush, rename = os.fsync, Path.rename

    def flushed(number: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        flush(number)

    def renamed(self: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    await queue.write_payload("g.0", "t", LARGE, 60)
    assert steps == ["folder", "file", "rename", "folder"], "the shard's own name first"


@pytest.mark.parametrize("size", [1, MOST])
async def test_what_is_not_stays_in_redis(queue: Queue, folder: Path, size: int) -> None:
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, b"x" * size, 60)
    assert files(folder) == []
    assert await queue.read_payload(claim.id, claim.token) == b"x" * size


async def test_a_task_goes_the_same_way(queue: Queue, folder: Path) -> None:
    assert await put(queue, samples=2) == 2
    (path,) = files(folder)
    assert path.read_bytes() == LARGE == await queue.read_task("g")


async def test_the_claim_brings_the_reference_along(queue: Queue) -> None:
    await put(queue)
    claim = await line.one(queue)
    assert claim.task.startswith(MAGIC)
    assert await queue.read_task("g", claim.task) == LARGE
    await written(queue, claim)
    after = await line.one(queue, "run")
    assert after.payload.startswith(MAGIC)
    assert await queue.read_payload(after.id, after.payload_token, after.payload) == LARGE


async def test_on_a_line_of_the_first_schema_nothing_lies_in_files(queue: Queue, folder: Path) -> None:
    await queue.execute("SET", queue.key("schema"), 1)
    await queue.check_schema()
    await queue.check_files()
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    await put(queue, "g2")
    assert list(folder.iterdir()) == [] and await queue.read_payload(claim.id, claim.token) == LARGE


def test_a_payload_rides_with_the_commit_unless_it_must_be_apart(folder: Path) -> None:
    assert Queue(None, Config()).rides(b"x" * 4096)  # type: ignore[arg-type]
    assert not Queue(None, configured(folder)).rides(b"x" * (MOST + 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "id", ["a/b", "../../etc/passwd", "..", ".", "x" * 200, "ü€🐍/é", "a:b:c", "with space\u00a0", "-rf"]
)
async def test_an_id_of_any_characters_names_a_file(queue: Queue, folder: Path, id: str) -> None:
    await put(queue, id, task=SMALL)
    claim = await line.one(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    (path,) = files(folder)
    assert len(path.relative_to(folder).parts) == 3 and len(path.name) < 80 and path.name.isascii()
    assert await queue.read_payload(claim.id, claim.token) == LARGE


async def test_many_files_lie_in_many_folders(queue: Queue, folder: Path) -> None:
    await asyncio.gather(*(queue.write_payload(f"g.{number}", "t", LARGE, 60) for number in range(64)))
    shards = {path.parent for path in files(folder)}
    assert len(files(folder)) == 64 and len(shards) > 20


async def test_every_write_has_a_file_of_its_own(queue: Queue, folder: Path) -> None:
    """A worker that was thought dead can't change what the winner committed, whatever it writes."""
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    await queue.write_payload(claim.id, "stale", LARGE[::-1], 60)
    await queue.write_payload(claim.id, claim.token, LARGE[::-1], 60)
    assert len(files(folder)) == 3
    assert await queue.read_payload(claim.id, claim.token) == LARGE[::-1]


async def test_two_lines_share_a_folder(queue: Queue, folder: Path) -> None:
    second = other(queue, queue.config.changed({"line.name": "second"}))
    claims = [await claimed(each) for each in (queue, second)]
    for each, claim in zip((queue, second), claims, strict=True):
        await written(each, claim)
    age(folder)
    await second.execute("DEL", second.key("p", claims[1].id, claims[1].token))
    assert await sweep(queue) == 0 and await sweep(second) == 1
    assert await queue.read_payload(claims[0].id, claims[0].token) == LARGE


# -- when it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [False, True])
async def test_with_the_last_ack_every_file_is_gone(queue: Queue, folder: Path, drop: bool) -> None:
    await put(queue, samples=2)
    for stage in ("init", "run", "eval"):
        for claim in await queue.claim(stage, 2, "w"):
            if stage == "run":
                await queue.write_payload(claim.id, claim.token, LARGE, 60)
            assert await line.pass_on(queue, claim, stage, written=stage == "run") == "OK"
    assert len(files(folder)) == 3
    first, second = await queue.pop("train", 2, "t", 60)
    assert await queue.take([first], drop=drop) == ["OK"]
    assert await emptied(queue) == 1
    assert await queue.take([first, second], drop=drop) == ["AGAIN", "OK"]
    assert await emptied(queue) == 2
    assert files(folder) == []
    assert await line.leftovers(queue) == []


async def test_what_is_replaced_goes(queue: Queue, folder: Path) -> None:
    claim = await claimed(queue)
    await written(queue, claim)
    again = await line.one(queue, "run")
    await written(queue, again, LARGE[::-1], "run")
    assert await emptied(queue) == 1
    (path,) = files(folder)
    assert path.read_bytes() == LARGE[::-1]
    last = await line.one(queue, "eval")
    assert await line.pass_on(queue, last, "eval", payload=SMALL) == "OK"
    assert await emptied(queue) == 1
    assert files(folder) == []


async def test_a_commit_after_a_cancel_leaves_no_file(queue: Queue, folder: Path) -> None:
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    assert await queue.cancel([claim.id]) == ["ASKED"]
    assert await line.pass_on(queue, claim, "init", written=True) == "CANCELLED"
    assert await emptied(queue) == 1
    assert files(folder) == []


async def test_a_group_that_closes_takes_its_files_along(queue: Queue, folder: Path) -> None:
    await put(queue, samples=2, wanted=1)
    first, second = await queue.claim("init", 2, "w")
    for claim in (first, second):
        await written(queue, claim)
    claims = {claim.id: claim for claim in await queue.claim("run", 2, "w")}
    await written(queue, claims[first.id], stage="run")
    await line.pass_on(queue, await line.one(queue, "eval"), "eval")
    await queue.write_payload(second.id, claims[second.id].token, LARGE, 60)
    assert await line.pass_on(queue, claims[second.id], "run", written=True) == "CANCELLED"
    await line.pop_and_take(queue, 2)
    await emptied(queue)
    assert files(folder) == []


async def test_a_file_outlives_its_key_by_what_redis_may_lose(queue: Queue, folder: Path) -> None:
    """Redis's machine dies right after the ack, and it comes back as it was before: it must find what it names."""
    await put(queue)
    await line.through(queue)
    key = queue.key("t", "g")
    held = await queue.execute("GET", key)
    await line.pop_and_take(queue)
    assert await queue.remove_due() == 0, "not yet"
    age(folder)
    assert await sweep(queue) == 0 and await audit(queue) == [], "what is in the trash is not left over"
    await queue.execute("SET", key, held)
    assert await queue.read_task("g") == LARGE
    await queue.execute("DEL", key)
    (member,) = await queue.execute("ZRANGE", queue.key("trash"), 0, -1)
    await queue.execute("ZINCRBY", queue.key("trash"), -1000 * payload_verbs.KEPT, member)
    assert await queue.remove_due() == 1 and await queue.remove_due() == 0
    assert files(folder) == []


async def test_a_worker_empties_the_trash(queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_verbs, "EVERY", 0.01)
    await put(queue)
    await line.through(queue)
    await line.pop_and_take(queue)
    (member,) = await queue.execute("ZRANGE", queue.key("trash"), 0, -1)
    await queue.execute("ZADD", queue.key("trash"), 1, member)
    working = asyncio.create_task(queue.keep_removing())
    async with asyncio.timeout(30.0):
        while files(folder):
            await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.wait({working})


async def test_what_went_from_the_trash_and_is_there_still_goes_with_the_sweep(queue: Queue, folder: Path) -> None:
    """A worker died between the two."""
    await put(queue)
    await line.through(queue)
    await line.pop_and_take(queue)
    assert len(await queue.verb("trash", 0, 10)) == 1
    age(folder)
    assert await sweep(queue) == 1


async def test_a_stale_attempts_file_goes_with_the_sweep(queue: Queue, folder: Path) -> None:
    claim = await claimed(queue)
    await queue.tick()
    await line.silence(queue, "init", claim.id)
    await queue.tick()
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    assert await line.pass_on(queue, claim, "init", written=True) == "STALE"
    age(folder)
    assert await sweep(queue) == 0, "its key is there still"
    await queue.execute("DEL", queue.key("p", claim.id, claim.token))
    assert await sweep(queue) == 1
    assert files(folder) == []


async def test_a_dead_letters_task_outlives_the_ack_and_the_requeued_one_has_its_own(
    queue: Queue, folder: Path
) -> None:
    data = encode_compressed(line.task(data={"text": os.urandom(600).hex()}), SCHEMA)
    await line.put(queue)
    await queue.execute("DEL", queue.key("t", "g"))
    await queue.execute("SET", queue.key("t", "g"), await queue.lay_task("g", data))
    assert await line.give_up(queue, await line.one(queue), "init", "fatal") == "FAILED"
    await line.pop_and_take(queue)
    assert await emptied(queue) == 0 and await queue.execute("TTL", queue.key("t", "g")) > 0
    new = await letters.requeue(queue, "g.0")
    group = new.rpartition(".")[0]
    assert len(files(folder)) == 2 and await queue.read_task(group) == data
    await queue.execute("DEL", queue.key("t", "g"))
    age(folder)
    assert await sweep(queue) == 1
    assert await queue.read_task(group) == data


async def test_a_letter_whose_task_file_is_gone_can_not_be_requeued(queue: Queue, folder: Path) -> None:
    await put(queue)
    assert await line.give_up(queue, await line.one(queue), "init", "fatal") == "FAILED"
    files(folder)[0].unlink()
    with pytest.raises(TaskError, match="can't be read .*is not there any more"):
        await letters.requeue(queue, "g.0")


# -- enqueue -----------------------------------------------------------------------------------------------------------


async def test_a_refused_task_leaves_no_file(queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = other(queue, queue.config.changed({"line.max_length": 1}))
    with pytest.raises(QueueFull):
        await put(small, samples=2)
    assert files(folder) == []

    async def full(*args: Any, **about: Any) -> Any:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    monkeypatch.setattr(queue, "verb", full)
    with pytest.raises(MemoryHigh, match="Redis is full"):
        await put(queue)
    assert files(folder) == []


async def test_the_same_task_twice_is_one_file_and_the_first_counts(queue: Queue, folder: Path) -> None:
    assert await put(queue) == 1
    assert await put(queue, task=LARGE[::-1]) == 0
    assert await put(queue, samples=2, task=LARGE[::-1]) == 1
    assert len(files(folder)) == 1 and await queue.read_task("g") == LARGE


async def test_a_task_that_was_enqueued_and_refused_the_second_time_keeps_its_file(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reply was lost, and Redis had no room for the same command sent again."""
    verb = queue.verb

    async def lost(name: str, *args: Any, **about: Any) -> Any:
        await verb(name, *args, **about)
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    monkeypatch.setattr(queue, "verb", lost)
    with pytest.raises(MemoryHigh):
        await put(queue)
    assert await queue.read_task("g") == LARGE


# -- a folder in trouble -----------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Every write fails with this errno while the list holds it."""
    broken, write = [number], payload_files._write_flushed

    def attempt(path: Path, data: bytes) -> None:
        if broken:
            write(path, data[: len(data) // 2])
            raise OSError(broken[0], os.strerror(broken[0]))
        write(path, data)

    monkeypatch.setattr(payload_files, "_write_flushed", attempt)
    return broken


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.ESTALE])
async def test_a_folder_that_takes_nothing_sends_a_finished_rollout_to_redis(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    broken = failing(monkeypatch, number)
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    await queue.write_payload(claim.id, "other", LARGE, 60)
    assert files(folder) == [] and await queue.read_payload(claim.id, claim.token) == LARGE
    assert caplog.text.count("takes no payload") == 1
    broken.clear()
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    assert len(files(folder)) == 1


async def test_where_redis_has_no_room_either_it_waits_for_either(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_verbs, "ANEW", 0.01)
    broken = failing(monkeypatch, errno.ENOSPC)

    async def high() -> bool:
        return True

    monkeypatch.setattr(queue, "memory_high", high)
    claim = await claimed(queue)
    writing = asyncio.create_task(queue.write_payload(claim.id, claim.token, LARGE, 60))
    done, _ = await asyncio.wait({writing}, timeout=0.2)
    assert not done and not await queue.execute("EXISTS", queue.key("p", claim.id, claim.token))
    broken.clear()
    await asyncio.wait_for(writing, 30.0)
    assert len(files(folder)) == 1 and await queue.read_payload(claim.id, claim.token) == LARGE


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, MemoryHigh), (errno.EIO, PayloadFilesAway)])
async def test_a_folder_that_takes_nothing_refuses_new_work(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    failing(monkeypatch, number)
    with pytest.raises(error, match=r"payload\.dir .* task g|task g was not enqueued"):
        await put(queue)
    assert files(folder) == [] and not await queue.has_group("g")


async def test_a_key_that_comes_too_late_gets_a_new_file(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis was away for so long that the sweep could have taken the first file."""
    monkeypatch.setattr(payload_verbs, "FRESH", 0.2)
    monkeypatch.setattr(payload_verbs, "ANEW", 0.0)
    execute, slow = queue.execute, [1]

    async def execute_slowly(*command: Any) -> Any:
        if command[0] == "SET" and ":p:" in command[1] and slow:
            slow.pop()
            await asyncio.sleep(0.3)
            for path in files(folder):
                path.unlink()
        return await execute(*command)

    monkeypatch.setattr(queue, "execute", execute_slowly)
    claim = await claimed(queue)
    await queue.write_payload(claim.id, claim.token, LARGE, 60)
    assert await queue.read_payload(claim.id, claim.token) == LARGE


async def test_a_file_that_is_seen_later_is_waited_for(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_verbs, "SEEN", 60.0)
    claim = await claimed(queue)
    await written(queue, claim)
    (path,) = files(folder)
    hidden = path.rename(path.with_suffix(".hidden"))
    reading = asyncio.create_task(queue.read_payload(claim.id, claim.token))
    await asyncio.wait({reading}, timeout=0.05)
    hidden.rename(path)
    assert await reading == LARGE


async def test_a_payload_that_is_acked_meanwhile_is_none(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_verbs, "SEEN", 60.0)
    claim = await claimed(queue)
    await written(queue, claim)
    files(folder)[0].unlink()
    reading = asyncio.create_task(queue.read_payload(claim.id, claim.token))
    await asyncio.wait({reading}, timeout=0.05)
    await queue.execute("DEL", queue.key("p", claim.id, claim.token))
    assert await asyncio.wait_for(reading, 30.0) is None


DAMAGES = {
    "gone": (lambda path: path.unlink(), "is not there any more"),
    "short": (lambda path: path.write_bytes(LARGE[:-1]), "999 bytes, written were 1000"),
    "long": (lambda path: path.write_bytes(LARGE + b"x"), "1001 bytes, written were 1000"),
    "changed": (lambda path: path.write_bytes(LARGE[::-1]), "was changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_file_is_an_error_that_says_so(queue: Queue, folder: Path, damage: str) -> None:
    claim = await claimed(queue)
    await written(queue, claim)
    act, said = DAMAGES[damage]
    act(files(folder)[0])
    with pytest.raises(EnvelopeError, match=said):
        await queue.read_payload(claim.id, claim.token)


async def test_of_a_popped_batch_only_the_damaged_one_is_failed(queue: Queue, folder: Path) -> None:
    ids = await line.put(queue, samples=3)
    for stage in ("init", "run", "eval"):
        for claim in await queue.claim(stage, 3, "w"):
            if stage == "run":
                builder = TrajectoryBuilder()
                builder.prompt([int(number) for number in os.urandom(2000)])
                payload = encode_compressed(Payload(trajectory=builder.build()), SCHEMA)
                await queue.write_payload(claim.id, claim.token, payload, 60)
            about = {"result": b"\x81\xa6reward\x01"} if stage == "eval" else {}
            await line.pass_on(queue, claim, stage, written=stage == "run", **about)
    token = await line.field(queue, ids[1], "payload")
    broken = reference_in(await queue.execute("GET", queue.key("p", ids[1], token)))
    assert broken is not None
    (folder / broken.path).unlink()
    leases = sorted(await queue.pop("train", 3, "t", 60))
    rollouts = await reading.read_all(queue, leases)
    assert [rollout.outcome for rollout in rollouts] == ["scored", "failed", "scored"]
    assert rollouts[1].failure is not None and "is not there any more" in rollouts[1].failure.why
    assert await queue.take(leases) == ["OK"] * 3 and await emptied(queue) == 2
    assert files(folder) == []


@pytest.mark.parametrize("elsewhere", ["not set", "another folder", "not mounted", "no way in"])
async def test_a_machine_that_sees_no_files_does_not_take_them_for_lost(
    queue: Queue, tmp_path: Path, elsewhere: str
) -> None:
    claim = await claimed(queue)
    await written(queue, claim)
    home = await queue.home()
    assert home is not None
    for name in ("another", "closed"):
        (tmp_path / name).mkdir()
    (tmp_path / "closed" / home.name).touch()  # root may look into any folder, but into no file
    place = {
        "not set": "", "another folder": str(tmp_path / "another"), "not mounted": str(tmp_path / "none"),
        "no way in": str(tmp_path / "closed"),
    }  # fmt: skip
    blind = other(queue, queue.config.changed({"payload.dir": place[elsewhere]}))
    with pytest.raises(PayloadFolderAway, match="payload.dir"):
        await blind.read_payload(claim.id, claim.token)


# -- references --------------------------------------------------------------------------------------------------------


def test_a_reference_travels() -> None:
    reference = Reference("home/ab/name", 123, b"d" * 32)
    assert reference_in(reference.pack()) == reference
    assert reference_in(encode_compressed(Payload(), SCHEMA)) is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../../x", "a/../b", "a/b", "a/b/c/d", "a//b", "", "a/b/c\0"])
def test_a_reference_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(EnvelopeError):
        reference_in(Reference(path, 1, b"d").pack())


@pytest.mark.parametrize("data", [MAGIC, MAGIC + b"\xc1", MAGIC + b"\x01", Reference("a/b/c", -1, b"d").pack()])
def test_a_damaged_reference_is_an_envelope_error(data: bytes) -> None:
    with pytest.raises(EnvelopeError):
        reference_in(data)


# -- start -------------------------------------------------------------------------------------------------------------


async def test_at_the_start_the_lines_folder_is_made_and_others_find_it(queue: Queue, folder: Path) -> None:
    await queue.check_files()
    (home,) = folder.iterdir()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    await asyncio.gather(*(other(queue, queue.config).check_files() for _ in range(5)))
    assert list(folder.iterdir()) == [home]


async def test_of_many_that_start_at_once_one_makes_the_folder(queue: Queue, folder: Path) -> None:
    await asyncio.gather(*(other(queue, queue.config).check_files() for _ in range(10)))
    assert len(list(folder.iterdir())) == 1


async def test_a_folder_that_is_not_there_is_a_sentence(queue: Queue, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        await other(queue, configured(tmp_path / "none")).check_files()
    assert not (tmp_path / "none").exists(), "a folder under an empty mount point would be this machine's own"


async def test_a_folder_that_can_not_be_written_is_a_sentence(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.EROFS)
    with pytest.raises(ConfigError, match="can't write there .Read-only"):
        await queue.check_files()


async def test_a_full_folder_does_not_keep_anybody_from_starting(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.ENOSPC)
    await queue.check_files()


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_whoever_starts_with_another_folder_is_told(queue: Queue, tmp_path: Path, elsewhere: bool) -> None:
    await queue.check_files()
    (tmp_path / "another").mkdir()
    config = queue.config.changed({"payload.dir": str(tmp_path / "another") if elsewhere else ""})
    with pytest.raises(ConfigError, match="same file system" if elsewhere else "is not set here"):
        await other(queue, config).check_files()


async def test_after_a_loss_of_redis_the_folder_stays_the_lines_own(queue: Queue, folder: Path) -> None:
    claim = await claimed(queue)
    await written(queue, claim)
    await queue.redis.flushall()
    await queue.check_files()
    await put(queue, "h")
    assert len(list(folder.iterdir())) == 1 and len(files(folder)) == 2
    age(folder)
    assert await sweep(queue) == 1, "what the lost server named is left over"
    assert await queue.read_task("h") == LARGE


# -- sweep and audit ---------------------------------------------------------------------------------------------------


async def test_the_sweep_leaves_what_is_young_and_what_is_named(queue: Queue, folder: Path) -> None:
    await put(queue)
    claim = await line.one(queue)
    await written(queue, claim)
    named = set(files(folder))
    assert len(named) == 2
    home = (await queue._home()).name
    stray = folder / queue.files.write(home, "p:x", LARGE).path
    half = stray.with_suffix(".part")
    half.write_bytes(b"half")
    assert await sweep(queue) == 0
    age(folder)
    assert await sweep(queue) == 2
    assert set(files(folder)) == named


async def test_a_server_that_starts_anew_during_the_sweep_stops_it(
    queue: Queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.files.write((await queue._home()).name, "p:x", LARGE)
    age(folder)
    runs = iter(["a", "b", "c", "c"])

    async def info(section: str) -> dict[str, str]:
        return {"run_id": next(runs)}

    monkeypatch.setattr(queue.redis, "info", info)
    assert [await sweep(queue), await sweep(queue)] == [0, 1]


async def test_without_a_folder_here_the_sweep_does_nothing(queue: Queue, tmp_path: Path) -> None:
    await queue.check_files()
    assert await sweep(other(queue, Config())) == 0
    assert await sweep(other(queue, configured(tmp_path / "none"))) == 0


async def test_the_audit_finds_what_is_missing_and_what_is_left_over(queue: Queue, folder: Path) -> None:
    await put(queue)
    claim = await line.one(queue)
    await written(queue, claim)
    assert await audit(queue) == []
    task = reference_in(await queue.execute("GET", queue.key("t", "g")))
    payload = reference_in(await queue.execute("GET", queue.key("p", claim.id, claim.token)))
    assert task is not None and payload is not None
    (folder / task.path).unlink()
    (folder / payload.path).write_bytes(b"short")
    stray = queue.files.write((await queue._home()).name, "p:x", LARGE).path
    assert len(await audit(queue)) == 2, "the stray one is young: its key may be on its way"
    age(folder)
    found = "\n".join(await audit(queue))
    assert f"key t:g names the payload file {task.path}, which is not there" in found
    assert f"names the payload file {payload.path}, which has 5 bytes instead of 1000" in found
    assert f"the payload file {stray} (1000 bytes, 10.0 h old) is named by no key" in found
    assert len(await audit(queue)) == 3


async def test_the_audit_says_where_it_can_not_look(queue: Queue, tmp_path: Path) -> None:
    await put(queue)
    for config in (Config(), configured(tmp_path / "none")):
        (finding,) = await audit(other(queue, config))
        assert "can't be looked at here" in finding


async def test_a_file_system_that_hangs_does_not_hold_the_loop(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = await claimed(queue)
    await written(queue, claim)
    there, read = threading.Event(), PayloadFiles.read

    def hang(self: PayloadFiles, reference: Reference) -> bytes:
        assert there.wait(30.0)
        return read(self, reference)

    monkeypatch.setattr(PayloadFiles, "read", hang)
    reading = asyncio.create_task(queue.read_payload(claim.id, claim.token))
    assert await queue.read_task("g") == SMALL, "the loop goes on"
    there.set()
    assert await reading == LARGE
