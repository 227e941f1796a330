"""The maintenance plane on a real Redis: each duty once a period, only names travel, RQ's tools see it all."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgpack
import pytest
from rq import Queue as RQQueue
from rq.job import Job

from pipeline.audit import audit
from pipeline.config import Config
from pipeline.queue import Queue
from tests.services import RedisService
from tests.waiting import sleepers, until
from workers import maintenance, maintenance_jobs
from workers.maintenance import Clock, Due, Msgpack, duties, queue_name
from workers.sandbox.host import sandbox_root
from workers.sandbox.images.cache import Cache

ROOT = Path(__file__).parents[2]
SLEEP = str(200_000 + os.getpid())
"""Seconds that a job of these tests would take: by them its process is told from any other's."""
ALL = {"evict", "sweep", "expire", "audit"}


@pytest.fixture
def config(redis_service: RedisService, tmp_path: Path) -> Config:
    return redis_service.config.changed(
        {"images.cache": str(tmp_path / "cache"), "sandbox.root": str(tmp_path / "boxes"), "limits.grace": 0.5}
    )


@contextmanager
def the_queue(service: RedisService, config: Config) -> Iterator[RQQueue]:
    with service.client_sync() as client:
        yield RQQueue(queue_name(config), connection=client, serializer=Msgpack)


def finished(queue: RQQueue) -> dict[str, Job]:
    """Duty -> its job, for what ended well."""
    jobs = [queue.fetch_job(id) for id in queue.finished_job_registry.get_job_ids()]
    return {str(job.func_name).rpartition(".")[2]: job for job in jobs if job is not None}


def test_every_duty_is_done(redis_service: RedisService, config: Config) -> None:
    assert maintenance.serve(config, burst=True) == 0
    with the_queue(redis_service, config) as queue:
        done = finished(queue)
        assert set(done) == ALL and queue.failed_job_registry.count == 0
        assert done["audit"].return_value() == []
        assert done["evict"].return_value() == {"evicted": [], "freed": 0}


def test_only_names_travel_and_no_pickle(redis_service: RedisService, config: Config) -> None:
    with redis_service.client_sync() as client:
        Clock(config, client).enqueue_jobs()
        calls = [msgpack.unpackb(zlib.decompress(client.hget(key, "data"))) for key in client.scan_iter("rq:job:*")]
    assert sorted(calls) == sorted([f"workers.maintenance_jobs.{name}", None, [], {}] for name in ALL)


def test_many_clocks_enqueue_once_a_period(
    redis_service: RedisService, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.changed({"sandbox.sweep": 3600.0})
    with redis_service.client_sync() as client:
        for _ in range(3):
            Clock(config, client).enqueue_jobs()
        assert RQQueue(queue_name(config), connection=client, serializer=Msgpack).count == len(ALL)
        monkeypatch.setattr(socket, "gethostname", lambda: "other.machine")
        Clock(config, client).enqueue_jobs()
        other = RQQueue("rollout:maint:other.machine", connection=client, serializer=Msgpack)
        assert sorted(job.func_name.rpartition(".")[2] for job in other.jobs) == ["evict", "sweep"]


def test_what_was_done_is_not_done_again_in_its_period(redis_service: RedisService, config: Config) -> None:
    config = config.changed({"sandbox.sweep": 3600.0})
    for _ in range(3):  # a period may end between the two
        before = periods(config)
        maintenance.serve(config, burst=True)
        with the_queue(redis_service, config) as queue:
            first = {name: job.ended_at for name, job in finished(queue).items()}
            maintenance.serve(config, burst=True)
            second = {name: job.ended_at for name, job in finished(queue).items()}
        if periods(config) == before:
            break
    assert first == second and set(first) == ALL


def periods(config: Config) -> list[str]:
    return [Due(config, duty).job_id(time.time()) for duty in duties(config)]


def test_images_to_prefetch_make_a_duty_of_their_own(redis_service: RedisService, config: Config) -> None:
    config = config.changed({"images.prefetch": ["host"]})
    assert {duty.name for duty in duties(config)} == ALL | {"prefetch"}
    maintenance.serve(config, burst=True)
    with the_queue(redis_service, config) as queue:
        assert finished(queue)["prefetch"].return_value() == {"host": "ready"}
    assert [entry.source for entry in Cache.of(config).entries()] == ["host"]


def test_a_duty_that_fails_is_kept_with_its_sentence(redis_service: RedisService, config: Config) -> None:
    maintenance.serve(config.changed({"images.prefetch": ["hots"]}), burst=True)
    with the_queue(redis_service, config) as queue:
        (id,) = queue.failed_job_registry.get_job_ids()
        result = Job.fetch(id, connection=queue.connection, serializer=Msgpack).latest_result()
    assert result is not None and "the image hots could not be prefetched: there is no image" in str(result.exc_string)


def test_the_sweep_removes_what_a_dead_host_left(redis_service: RedisService, config: Config) -> None:
    left = sandbox_root(config) / "deadhost" / "box"
    left.mkdir(parents=True)
    (left.parent / "owner").touch()
    maintenance.serve(config, burst=True)
    assert not left.parent.exists()


def test_audit_findings_are_logged(
    redis_service: RedisService, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_service.client_sync() as client:
        client.set("{rollout}:stray", "x")
    maintenance_jobs.use(config)
    assert maintenance_jobs.audit() == ["key stray is of no kind that this line knows"]
    assert "audit of line rollout: key stray is of no kind" in caplog.text


async def test_the_keys_of_rq_do_not_disturb_the_audit(redis_service: RedisService, config: Config) -> None:
    async with redis_service.client() as client:
        queue = Queue(client, config)
        with redis_service.client_sync() as plain:
            Clock(config, plain).enqueue_jobs()
        assert await audit(queue) == []


async def test_expiry_ends_what_nothing_names_and_nothing_else(redis_service: RedisService, config: Config) -> None:
    async with redis_service.client() as client:
        queue = Queue(client, config)
        await queue.enqueue("g1", b"task", [("g1.0", b"envelope")])
        for key in ("p:g1.0:t1", "p:g1.0:t2", "p:gone.0:t1", "t:gone"):
            await client.set(queue.key(key), "x")
        await client.hset(queue.key("r:g1.0"), "payload", "t1")
        await client.zadd(queue.key("dead:run"), {"old": 1000.0, "new": time.time() * 1000})
        found = await maintenance_jobs.expire_line(queue)
        assert found == {"letters": 1, "given an end": 3, "files": 0}
        assert await maintenance_jobs.expire_line(queue) == {"letters": 0, "given an end": 0, "files": 0}
        lives = {key: await client.ttl(queue.key(key)) for key in ("p:g1.0:t1", "p:g1.0:t2", "t:g1", "t:gone")}
        assert lives["p:g1.0:t1"] == lives["t:g1"] == -1
        assert 0 < lives["p:g1.0:t2"] <= config.keep.gone_hours * 3600 and lives["t:gone"] > 0
        assert await client.zrange(queue.key("dead:run"), 0, -1) == [b"new"]


# -- as a process ----------------------------------------------------------------------------------------------------


@contextmanager
def worker(config: Config, log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`rollout work maint`, as a person starts it; killed at the end if it still lives."""
    settings = {
        "ROLLOUT_REDIS__URL": config.redis.url,
        "ROLLOUT_REDIS__PASSWORD_FILE": config.redis.password_file,
        "ROLLOUT_IMAGES__CACHE": config.images.cache,
        "ROLLOUT_SANDBOX__ROOT": config.sandbox.root,
        "ROLLOUT_LIMITS__GRACE": str(config.limits.grace),
        "PYTHONPATH": str(ROOT),
    }
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.cli", "work", "maint"],
            env={**os.environ, **settings, **more}, stdout=out, stderr=out, cwd=log.parent,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def rq_info(service: RedisService) -> str:
    password = Path(service.password_file).read_text().strip()
    url = service.url.replace("unix://", f"unix://:{quote(password, safe='')}@")
    found = subprocess.run(
        [str(Path(sys.executable).with_name("rq")), "info"],
        env={**os.environ, "RQ_REDIS_URL": url}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return found.stdout + found.stderr


def test_rq_info_shows_the_queue_and_its_worker(redis_service: RedisService, config: Config, tmp_path: Path) -> None:
    with worker(config, tmp_path / "log") as process, the_queue(redis_service, config) as queue:
        until(lambda: set(finished(queue)) == ALL)
        said = rq_info(redis_service)
        assert queue_name(config) in said and f"{queue_name(config)}:{process.pid}" in said and "1 workers" in said
        secret = Path(redis_service.password_file).read_bytes().strip()
        for file in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{process.pid}/{file}").read_bytes()
        process.terminate()
        assert process.wait(20) == 0
        assert "0 workers" in rq_info(redis_service)
    assert "maintenance: evict, sweep, expire, audit" in (tmp_path / "log").read_text()


def test_ctrl_c_is_told_apart(redis_service: RedisService, config: Config, tmp_path: Path) -> None:
    with worker(config, tmp_path / "log") as process, the_queue(redis_service, config) as queue:
        until(lambda: set(finished(queue)) == ALL)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_job_that_does_not_end_is_killed_after_the_grace(
    redis_service: RedisService, config: Config, tmp_path: Path
) -> None:
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nexec sleep {SLEEP}\n")
    tool.chmod(0o755)
    more = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "ROLLOUT_IMAGES__PREFETCH": '["docker://x"]'}
    with worker(config, tmp_path / "log", **more) as process:
        until(lambda: sleepers(SLEEP))
        process.terminate()
        assert process.wait(20) == 0
        until(lambda: not sleepers(SLEEP))
    assert "did not end within 0.5 s and is killed" in (tmp_path / "log").read_text()


def test_the_clock_outlasts_a_redis_that_is_away(
    redis_server: RedisService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "LONGEST_WAIT", 0.1)
    caplog.set_level(logging.WARNING)
    with redis_server.client_sync() as client, Clock(redis_server.config, client) as clock:
        until(lambda: client.exists(clock.key))
        os.kill(redis_server.pid, signal.SIGKILL)
        clock._cron_jobs[0].latest_enqueue_time = None  # due now
        until(lambda: "maintenance is not enqueued for now: Redis at" in caplog.text)
        assert clock._thread.is_alive()
