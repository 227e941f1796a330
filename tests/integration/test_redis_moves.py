"""A Redis that moves: clients follow its address, `rollout redis start --publish` keeps it, one after another."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline import address_file, moving, published_data, publisher, server
from pipeline.address_file import Address
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.connection import connect, connect_sync
from pipeline.errors import LineError, RedisUnavailable
from pipeline.folder_lock import look
from pipeline.publisher import Plan, Publisher
from pipeline.server import Server
from tests.published import LEASE, Keepers, family, freeze, keepers, thaw
from tests.services import require
from tests.waiting import until
from workers.cli import published
from workers.doctor.folder import findings, judged


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keepers]:
    require("redis-server")
    with keepers(tmp_path) as found:
        yield found


@pytest.fixture
def two() -> Iterator[tuple[Server, Server]]:
    require("redis-server")
    with server.start(tcp=("127.0.0.1", 0)) as one, server.start(tcp=("127.0.0.1", 0)) as other:
        yield one, other


def publish(file: Path, running: Server, epoch: int, database: int = 0) -> None:
    address_file.publish(
        file,
        Address(
            url=f"{running.url[:-1]}{database}", password=Path(running.password_file).read_text().strip(), epoch=epoch,
            job="", started=time.time(),
        ),
    )  # fmt: skip


def following(file: Path) -> Config:
    return Config().changed({"redis.address_file": str(file), "limits.outage": 30.0})


# -- clients ---------------------------------------------------------------------------------------------------------


async def test_new_connections_follow_with_another_password_and_database(
    tmp_path: Path, two: tuple[Server, Server]
) -> None:
    file = tmp_path / "a"
    publish(file, two[0], 1)
    config = following(file)
    async with connect(config, name="one") as client:
        with connect_sync(config, name="two", blocking=True) as plain:
            await client.set("x", "first")
            assert plain.get("x") == b"first"
            publish(file, two[1], 2, database=3)
            two[0].kill()
            for _ in range(2):  # the connections that are dead by now
                try:
                    await client.set("x", "second")
                except RedisConnectionError:
                    continue
            assert await client.get("x") == plain.get("x") == b"second"
            assert plain.client_info()["db"] == 3


async def test_an_idle_connection_does_not_speak_to_a_server_that_was_followed(
    tmp_path: Path, two: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung, another one took its place, and it woke: its connections still work."""
    file = tmp_path / "a"
    publish(file, two[0], 1)
    monkeypatch.setattr(moving, "IDLE_SECONDS", 0.2)
    config = following(file)
    async with connect(config) as client:
        with connect_sync(config) as plain:
            await client.set("x", "old")
            assert plain.get("x") == b"old"
            publish(file, two[1], 2)
            await asyncio.sleep(0.25)
            await client.set("x", "new")
            assert plain.get("x") == b"new"
            pipe = client.pipeline(transaction=False)
            pipe.get("x")
            assert await pipe.execute() == [b"new"]


async def test_an_idle_connection_stays_where_nothing_moved(
    tmp_path: Path, two: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a"
    publish(file, two[0], 1)
    monkeypatch.setattr(moving, "IDLE_SECONDS", 0.05)
    async with connect(following(file)) as client:
        name = await client.client_id()
        await asyncio.sleep(0.1)
        assert await client.client_id() == name


async def test_without_an_address_each_command_says_so(tmp_path: Path) -> None:
    config = following(tmp_path / "a")
    async with connect(config) as client:
        with pytest.raises(RedisConnectionError, match="no Redis has published its address"):
            await client.ping()
    with connect_sync(config) as plain, pytest.raises(RedisConnectionError, match="no Redis has published its address"):
        plain.ping()


async def test_a_trainer_waits_for_a_redis_that_is_not_there_yet(
    tmp_path: Path, two: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a"
    client = RolloutClient(config=following(file))
    opening = asyncio.create_task(client.open())
    while "waiting for Redis: no Redis has published its address" not in caplog.text:
        await asyncio.sleep(0.02)
    assert not opening.done()
    publish(file, two[0], 1)
    await asyncio.wait_for(opening, 10.0)
    assert "Redis is there, after" in caplog.text
    assert await client.status()
    await client.close()


async def test_a_trainer_does_not_wait_for_ever(tmp_path: Path) -> None:
    config = following(tmp_path / "a").changed({"limits.outage": 0.1})
    with pytest.raises(RedisUnavailable, match=r"no Redis came within limits.outage = 0.1 s: no Redis has published"):
        await RolloutClient(config=config).open()


async def test_a_url_that_is_given_is_meant(tmp_path: Path, two: tuple[Server, Server]) -> None:
    """`url` wins over a file that the settings follow, and is asked once."""
    began = time.monotonic()
    with pytest.raises(RedisUnavailable, match="redis://127.0.0.1:1 can't be reached"):
        await RolloutClient("redis://127.0.0.1:1/0", config=following(tmp_path / "a")).open()
    assert time.monotonic() - began < 5.0


# -- keepers ---------------------------------------------------------------------------------------------------------


def test_one_keeper_after_another_goes_on_with_the_data(kept: Keepers) -> None:
    first = kept.started()
    one = address_file.read(kept.file)
    assert (one.epoch, one.job) == (1, "") and one.host == "127.0.0.1"
    with connect_sync(kept.config) as client:
        client.set("x", "1")
        second = kept.start()
        until(lambda: "this one waits, and follows when that one ends" in kept.log(1).read_text())
        assert f"(pid {first.pid}, since" in kept.log(1).read_text()
        first.terminate()
        assert first.wait(20) == 0
        two = kept.published(1)
        assert two.password != one.password and two.url != one.url
        assert client.get("x") == b"1"
    assert sorted(os.listdir(kept.folder / "redis")) == ["data-1", "lock.2", "log"]
    second.terminate()
    assert second.wait(20) == 0
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(second.pid)


def test_the_password_stands_in_the_address_file_alone(kept: Keepers) -> None:
    keeper = kept.started()
    secret = address_file.read(kept.file).password.encode()
    assert stat.S_IMODE(kept.file.stat().st_mode) == 0o600
    for process in family(keeper):
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    assert secret.decode() not in kept.logs()
    for folder, _, files in os.walk(kept.folder / "redis"):
        assert not any(secret in (Path(folder) / name).read_bytes() for name in files)


def test_a_worker_that_slurm_has_lost_sight_of_ends_with_its_line(kept: Keepers) -> None:
    keeper = kept.started()
    log = kept.folder.parent / "worker.log"
    with open(log, "wb") as out:
        command = [sys.executable, "-m", "workers.cli", "work", "run"]
        worker = subprocess.Popen(command, env=kept.environment(), cwd=kept.folder.parent, stderr=out)
    try:
        until(lambda: b"serves run" in log.read_bytes(), 30.0)
        keeper.terminate()
        keeper.wait(20)
        until(lambda: b"Redis does not answer" in log.read_bytes(), 30.0)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(1.5)  # another Redis may follow
        address_file.take_down(kept.file)
        assert worker.wait(15) in (0, 1), log.read_text()  # well before limits.grace
        assert "asked to stop (the line was taken down)" in log.read_text()
    finally:
        worker.kill()
        worker.wait()


def test_a_keeper_that_is_killed_takes_its_server_along_and_is_followed(kept: Keepers) -> None:
    first = kept.started()
    processes = family(first)
    assert len(processes) == 3
    with connect_sync(kept.config) as client:
        client.set("x", "1")
        first.kill()
        first.wait()
        until(lambda: not any(process.is_running() for process in processes))
        kept.started()
        until(lambda: _get(client) == b"1")
    assert "took no leave: its data are copied" in kept.logs()
    until(lambda: sorted(os.listdir(kept.folder / "redis")) == ["data-2", "lock.2", "log"])


def _get(client: redis.Redis) -> object:
    try:
        return client.get("x")
    except redis.RedisError as error:
        return error


@pytest.mark.ci
def test_who_is_told_to_end_before_its_copy_is_whole_leaves_the_copying_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before took no leave, and may still wake up and write: that holds until a copy is whole."""
    home = tmp_path / "redis"
    (home / "data-1").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (home / "lock.1").write_text('{"state": "held    ", "host": "n9"}')
    plan = Plan(
        home=home, file=tmp_path / "address.json", bind=("127.0.0.1", 0), lease=0.4, fraction=0.1, job=""
    )  # fmt: skip
    keeper = Publisher(plan)

    def stopped(*_: object, **named: object) -> Path:
        keeper.stop()
        raise RedisUnavailable("it is not wanted any more")

    monkeypatch.setattr(published_data, "prepared", stopped)
    keeper.run()
    left = look(home / "lock")
    assert left is not None and left.number == 2 and not left.released


def test_a_server_that_dies_is_started_again_with_its_data(kept: Keepers) -> None:
    keeper = kept.started()
    with connect_sync(kept.config) as client:
        client.set("x", "1")
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
        kept.published(1)
        until(lambda: _get(client) == b"1")
    assert keeper.poll() is None and "the server ended by itself" in kept.logs()


def test_an_address_that_somebody_spoils_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("redis-server")
    monkeypatch.setattr(publisher, "LOOK_AT_FILE", 0.1)
    plan = Plan(home=tmp_path / "redis", file=tmp_path / "a", bind=("127.0.0.1", 0), lease=10.0, fraction=0.1, job="")
    told: list[Address] = []
    kept = Publisher(plan, told.append)
    thread = threading.Thread(target=kept.run)
    thread.start()
    try:
        until(lambda: told)
        for text in ('{"url": "redis://10.', json.dumps({**asdict(told[0]), "epoch": 0, "url": "redis://192.0.2.1:1"})):
            plan.file.write_text(text)
            until(lambda: _read(plan.file) == told[0])
        plan.file.unlink()
        until(lambda: _read(plan.file) == told[0])
        assert len(told) == 1, "it is the same server"
    finally:
        kept.stop()
        thread.join(20)
    assert address_file.last_epoch(plan.file) == told[0].epoch and _read(plan.file) is None


def _read(file: Path) -> Address | None:
    try:
        return address_file.read(file)
    except RedisUnavailable:
        return None


@pytest.mark.ci
def test_a_frozen_keeper_loses_its_server_at_once_and_begins_anew(kept: Keepers) -> None:
    """The keeper alone stands still: its guard ends the server, before anybody else may have the lock."""
    keeper = kept.started()
    _, guard, served = family(keeper)
    keeper.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: not served.is_running())
    assert time.monotonic() - began < LEASE
    keeper.send_signal(signal.SIGCONT)
    kept.published(1)
    assert "the lock was lost" in kept.logs() and not guard.is_running()


@pytest.mark.ci
def test_a_job_that_is_suspended_wakes_up_without_its_server(kept: Keepers) -> None:
    first = kept.started()
    one = address_file.read(kept.file)
    frozen = freeze(first)
    with redis.Redis(host=one.host, port=one.port, password=one.password, protocol=2) as old:
        kept.started()
        began = time.monotonic()
        thaw(frozen)
        until(lambda: not frozen[2].is_running())
        assert time.monotonic() - began < 5.0
        with pytest.raises(RedisConnectionError):
            old.ping()
    assert first.poll() is None, "it waits again"
    until(lambda: "this one waits, and follows when that one ends" in kept.log(0).read_text())
    with connect_sync(kept.config) as client:
        assert client.ping()


def test_status_and_stop_of_a_published_server(kept: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RedisUnavailable, match="no Redis has published its address"):
        published.status(kept.config, as_json=False)
    with pytest.raises(LineError, match="no published Redis runs"):
        published.stop(kept.config, as_json=False)
    keeper = kept.start(SLURM_JOB_ID="4711")
    address = kept.published(0)
    published.status(kept.config, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["url"], said["epoch"], said["job"], said["answers"]) == (address.url, 1, "4711", True)
    assert said["holder"]["pid"] == keeper.pid and "password" not in said
    published.status(kept.config, as_json=False)
    assert f"{address.url} (epoch 1, job 4711; kept by job 4711 on " in capsys.readouterr().out
    threading.Thread(target=keeper.wait).start()  # as the shell that started it: no zombie is left
    published.stop(kept.config, as_json=False)
    assert f"stopped (keeper {keeper.pid})" in capsys.readouterr().out
    with pytest.raises(RedisUnavailable, match=r"the line is down: its Redis \(job 4711\) ended in good order"):
        published.status(kept.config, as_json=False)
    done = kept.rollout("depth")
    assert done.returncode == 1 and done.stderr.startswith("Error: the line is down: ")
    holder = {"state": "held    ", "job": "4711", "host": "n7", "pid": os.getpid()}
    (kept.folder / "redis" / "lock.9").write_text(json.dumps(holder))
    with pytest.raises(LineError, match=r"job 4711 on n7 .* on another machine: `scancel --signal=TERM --batch 4711`"):
        published.stop(kept.config, as_json=False)


def test_wrong_use_is_said(kept: Keepers) -> None:
    done = kept.rollout("redis", "start", "--publish")
    assert done.returncode == 2 and "--publish belongs to --foreground" in done.stderr
    done = kept.rollout("redis", "start", "--publish", "--foreground", ROLLOUT_REDIS__URL="redis://h")
    assert done.returncode == 1 and "leave redis.url empty" in done.stderr
    done = kept.rollout("redis", "start", "--publish", "--foreground", "--bind", "nosuch0")
    assert done.returncode == 1 and "no interface 'nosuch0'" in done.stderr


@pytest.mark.ci
def test_a_full_folder_delays_the_address_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    require("redis-server")
    real, failed = address_file.publish, []

    def full(file: Path, address: Address) -> None:
        if len(failed) < 2:
            failed.append(address.epoch)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, address)

    monkeypatch.setattr(publisher.address_file, "publish", full)
    plan = Plan(home=tmp_path / "redis", file=tmp_path / "a", bind=("127.0.0.1", 0), lease=10.0, fraction=0.1, job="")
    told: list[Address] = []
    kept = Publisher(plan, told.append)
    thread = threading.Thread(target=kept.run)
    thread.start()
    try:
        until(lambda: told)
        assert failed == [1, 1] and address_file.read(plan.file) == told[0]
        assert "is tried again: [Errno 28] No space left on device" in caplog.text
    finally:
        kept.stop()
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.ci
def test_a_server_that_never_starts_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Server:
        raise RedisUnavailable("redis-server ended while it started; it said: no")

    monkeypatch.setattr(publisher.server, "start_guarded", broken)
    monkeypatch.setattr(publisher, "AGAIN", 0.01)
    plan = Plan(home=tmp_path / "r", file=tmp_path / "a", bind=("127.0.0.1", 0), lease=10.0, fraction=0.1, job="")
    with pytest.raises(RedisUnavailable, match="did not stay up in 5 tries"):
        Publisher(plan).run()
    assert [path.name for path in (tmp_path / "r").glob("lock.*")] == ["lock.1"]
    assert '"released"' in (tmp_path / "r" / "lock.1").read_text(), "the next job need not wait"


# -- who uses it -----------------------------------------------------------------------------------------------------


MAINTENANCE = """
from workers import maintenance
from workers.cli.app import rollout
maintenance.WORKER_TTL = 3  # a reply is waited for for 11 s
rollout(["work", "maint"])
"""


@pytest.mark.ci
def test_maintenance_goes_on_when_redis_hung_and_moved(kept: Keepers, tmp_path: Path) -> None:
    """RQ gives up on a Redis that hangs for so long; the process does not."""
    first = kept.started()
    log = tmp_path / "maint.log"
    more = {"ROLLOUT_REDIS__SOCKET_TIMEOUT": "1.0", "ROLLOUT_IMAGES__CACHE": str(tmp_path / "images")}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", MAINTENANCE], env=kept.environment(**more), cwd=tmp_path, stdout=out, stderr=out
        )
    try:
        with connect_sync(kept.config) as client:
            until(lambda: client.smembers("rq:workers"))
            frozen = freeze(first)
            until(lambda: "the maintenance worker gave up on Redis" in log.read_text(), 60.0)
            kept.started()
            thaw(frozen)
            name = f":{process.pid}.2".encode()
            until(lambda: any(worker.endswith(name) for worker in client.smembers("rq:workers")), 30.0)
        process.terminate()
        assert process.wait(20) == 0
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


async def test_doctor_measures_the_folder(tmp_path: Path) -> None:
    assert await findings(Config()) == []
    (found,) = await findings(Config().changed({"slurm.folder": str(tmp_path / "not" / "yet")}))
    assert found.name == "fsync" and f"for one in {tmp_path}," in found.text and "measured" in found.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("spent", "lock", "grade", "words"),
    [
        ([0.001] * 40, 10.0, "ok", "1.0 ms for one in /f, 1.0 ms at worst (40 measured): good for `everysec`"),
        ([0.3] * 17, 10.0, "warn", "it may take over 2 s"),
        ([0.001] * 39 + [2.5], 10.0, "warn", "2.5 s at worst (40 measured): Redis makes its clients wait"),
        ([0.001] * 39 + [5.0], 10.0, "fail", "the lock of 10 s would be lost"),
        ([0.001] * 39 + [6.0], 0.0, "warn", "Redis makes its clients wait"),
    ],
)
def test_what_an_fsync_time_means(spent: list[float], lock: float, grade: str, words: str) -> None:
    found = judged(Path("/f"), spent, lock)
    assert found.grade == grade and words in found.text
    assert grade == "fail" or "dies loses the last second" in found.text
