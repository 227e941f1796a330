"""Payload files on a real server: the whole line, a machine that does not see them, doctor, audit and maintenance."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from handlers.echo import signature
from pipeline import payload_verbs
from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Stage, Task
from pipeline.errors import ConfigError, PayloadFilesAway
from pipeline.queue import Queue
from tests import line
from tests.integration.crew import configured, serving
from tests.services import RedisService
from workers import maintenance_jobs
from workers.cli.app import rollout
from workers.loop import Worker

TOKENS = 8192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir()
    return made


@pytest.fixture
def config(redis_service: RedisService, folder: Path) -> Config:
    """Tasks, too, are above the mark: all that can lie in a file does."""
    return configured(redis_service, payload__dir=str(folder), payload__inline_max=50)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def command(service: RedisService, folder: Path, *words: str) -> Result:
    place = [f"--set=redis.url={service.url}", f"--set=redis.password_file={service.password_file}"]
    return CliRunner().invoke(rollout, [*place, f"--set=payload.dir={folder}", *words])


async def test_through_the_whole_line_and_nothing_is_left(config: Config, folder: Path) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        ids = await client.enqueue([Task(handler="echo", data={"tokens": TOKENS}) for _ in range(6)], samples=4)
        groups = await client.pop_groups(6, timeout=60)
        assert len(files(folder)) == 6 + 24, "each group's task, each rollout's trajectory"
        assert {rollout.id for group in groups for rollout in group.scored} == set(ids)
        for group in groups:
            for found in group.rollouts:
                assert found.trajectory is not None
                assert tuple(found.trajectory.sequences[0].token_ids[:8]) == signature(found.id)
        token = await line.field(client.queue, ids[0], "payload")
        memory = await client.queue.execute("MEMORY", "USAGE", client.queue.key("p", ids[0], token))
        assert memory < 1000, "Redis holds a reference"
        await client.ack(groups)
        await client.queue.remove_due(kept=0.0)
        assert files(folder) == [] and await line.leftovers(client.queue) == []


async def test_a_trainer_that_does_not_see_the_files_is_told_and_loses_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_verbs, "SEEN", 0.1)
    (tmp_path / "another").mkdir()
    elsewhere = config.changed({"payload.dir": str(tmp_path / "another")})
    early = RolloutClient(config=config.changed({"payload.dir": ""}))
    async with early:  # before the line had files: it could not be told at its start
        async with RolloutClient(config=config) as client, serving(config):
            ids = await client.enqueue([Task(handler="echo", data={"tokens": TOKENS})], samples=3)
            await line_is_done(client, 3)
            with pytest.raises(PayloadFilesAway, match=r"payload\.dir is not set here"):
                await early.pop(3, timeout=5)
            late = RolloutClient(config=elsewhere)
            with pytest.raises(ConfigError, match="same file system"):
                await late.open()
            await late.close()
            batch = await client.pop(3, timeout=30)
            assert {found.id for found in batch if found.outcome == "scored"} == set(ids)
            await client.ack(batch)


async def line_is_done(client: RolloutClient, count: int) -> None:
    batch = await client.pop(count, timeout=30)
    await client.queue.hand_back(batch.leases)


async def test_a_worker_without_a_folder_ends_and_nothing_counts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_verbs, "SEEN", 0.1)
    async with RolloutClient(config=config) as client:
        await client.enqueue([Task(handler="echo", data={"tokens": TOKENS})])
        await client.queue.execute("DEL", client.queue.key("files"))  # as on a line that has no files yet
        blind = config.changed({"payload.dir": "", "limits.loop_dead": 3600.0})
        with pytest.raises(ConfigError, match="payload.dir is not set here"):
            await asyncio.wait_for(Worker(blind, Stage.INIT, 1).run(), 30.0)
        async with serving(config):
            (found,) = await client.pop(1, timeout=30)
        assert found.outcome == "scored" and found.losses == 0
        assert [item["outcome"] for item in found.attempts if item["outcome"] != "committed"] == ["given back"]
        await client.ack(found)


@pytest.fixture
def away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is moved as soon as a process of the line has found it at its start."""
    monkeypatch.setattr(payload_verbs, "SEEN", 0.1)
    away, check = folder.with_name("away"), Queue.check_files

    async def check_and_lose(self: Queue, **about: bool) -> None:
        await check(self, **about)
        folder.rename(away)

    monkeypatch.setattr(Queue, "check_files", check_and_lose)
    return away


async def test_while_the_folder_is_away_nothing_is_claimed_and_nothing_counts(
    config: Config, folder: Path, request: pytest.FixtureRequest
) -> None:
    """A file system that is away for a minute is no fault of any rollout: each would be lost ten times."""
    config = config.changed({"retry.losses": 1, "retry.attempts": 1})
    async with RolloutClient(config=config) as client:
        ids = await client.enqueue([Task(handler="echo", data={"tokens": TOKENS})], samples=4)
        away = request.getfixturevalue("away")
        async with serving(config, "init", slots=2) as crew:
            async with asyncio.timeout(30.0):
                while not hasattr(crew["init"], "claims") or not crew["init"].claims.blind or crew["init"].running:
                    await asyncio.sleep(0.02)
            with pytest.raises(PayloadFilesAway):
                await client.enqueue([Task(handler="echo", data={"tokens": TOKENS})])
            away.rename(folder)
            request.getfixturevalue("monkeypatch").undo()
            async with serving(config, "run", "eval"):
                batch = await client.pop(4, timeout=30)
        assert {item.id: (item.outcome, item.losses) for item in batch} == dict.fromkeys(ids, ("scored", 0))
        await client.ack(batch)


@pytest.mark.ci
async def test_a_worker_whose_folder_stays_away_ends(config: Config, request: pytest.FixtureRequest) -> None:
    config = config.changed({"limits.outage": 0.3, "limits.loop_dead": 3600.0})
    async with RolloutClient(config=config) as client:
        (id,) = await client.enqueue([Task(handler="echo", data={"tokens": TOKENS})])
        request.getfixturevalue("away")
        with pytest.raises(ConfigError, match="payload.dir is"):
            await asyncio.wait_for(Worker(config, Stage.INIT, 1).run(), 30.0)
        assert await line.state(client.queue, id) == ("init", "ready")


async def test_maintenance_and_audit_know_them(config: Config, folder: Path) -> None:
    async with RolloutClient(config=config) as client:
        await client.enqueue([Task(handler="echo")], samples=2)
        (task,) = files(folder)
        stray = task.with_name("0" * 41)
        stray.write_bytes(b"stray")
        assert (await maintenance_jobs.expire_line(client.queue))["files"] == 0, "too young to be left over"
        for path in (task, stray):
            os.utime(path, (1e9, 1e9))
        assert [f"{stray.name} (5 bytes" in said for said in await audit(client.queue)] == [True]
        assert (await maintenance_jobs.expire_line(client.queue))["files"] == 1
        assert files(folder) == [task]
        task.unlink()
        assert ["which is not there" in said for said in await audit(client.queue)] == [True]


def test_doctor_measures_the_folder(redis_service: RedisService, folder: Path, tmp_path: Path) -> None:
    said = json.loads(command(redis_service, folder, "doctor", "--json").output)
    (found,) = [item for item in said if item["name"] == "payload"]
    assert found["grade"] == "ok" and "written and flushed in" in found["text"]
    said = json.loads(command(redis_service, tmp_path / "none", "doctor", "--json").output)
    (found,) = [item for item in said if item["name"] == "payload"]
    assert found["grade"] == "fail" and "no such folder" in found["text"]
    assert list(folder.iterdir()) == [], "doctor changes nothing"


def test_a_worker_that_can_not_write_there_does_not_start(redis_service: RedisService, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = command(redis_service, tmp_path / "file", "work", "run", "--burst")
    assert said.exit_code == 1 and "there is no such folder on this machine" in said.output
