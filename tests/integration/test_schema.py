"""A line whose schema is raised while this version works on it: workers, trainer and commands, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import OLDEST_SCHEMA, READS, SCHEMA, WORKING, Task
from pipeline.errors import TooOld
from pipeline.line_schema import raise_schema
from pipeline.queue import Queue
from tests.integration.crew import configured, serving
from tests.services import RedisService
from workers.cli.app import rollout
from workers.loop import Worker

NEXT = SCHEMA + 1


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service)


def where(service: RedisService) -> list[str]:
    return [f"--set=redis.url={service.url}", f"--set=redis.password_file={service.password_file}"]


def call(service: RedisService, *words: str) -> Result:
    return CliRunner().invoke(rollout, [*where(service), *words])


async def until_line(queue: Queue, **wanted: str) -> None:
    """Until the first worker on the list says all of this of itself."""
    async with asyncio.timeout(20):
        while True:
            for told in await queue.execute("HVALS", queue.key("workers")):
                about = json.loads(told)
                if all(str(about.get(name)) == value for name, value in wanted.items()):
                    return
            await asyncio.sleep(0.02)


async def test_a_worker_that_becomes_too_old_finishes_claims_nothing_and_ends(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with RolloutClient(config=config) as client:
        crew = [Worker(config.changed({"limits.grace": 0.1}), stage, 1) for stage in WORKING]
        running = [asyncio.create_task(worker.run()) for worker in crew]
        first, second = await client.enqueue([Task(handler="echo", data={"sleep": 1.5})], samples=2)
        await until_line(client.queue, stage="run", running="1")
        async with asyncio.timeout(20):
            while not await client.queue.execute("ZCARD", client.queue.key("ready", "run", "train")):
                await asyncio.sleep(0.02)
        await raise_schema(client.queue, NEXT)
        await until_line(client.queue, outdated="True", stopping="True", running="1")
        ended = await asyncio.gather(*running, return_exceptions=True)

        assert [type(error) for error in ended] == [TooOld] * 3
        stages = [await client.queue.execute("HGET", client.queue.key("r", id), "stage") for id in (first, second)]
        assert stages == [b"eval", b"run"], "one was finished, whatever the grace; the other one was not begun"
        assert await client.queue.execute("HGET", client.queue.key("counts"), "loss:run") is None
        said = [record for record in caplog.records if "What is in work is finished" in record.getMessage()]
        assert len(said) == 3, "each of the three workers once"


async def test_a_trainer_that_becomes_too_old_is_told_and_keeps_what_it_has(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        async with serving(config):
            await client.enqueue([Task(handler="echo")], samples=2)
            batch = await client.pop(1, timeout=20)
            await client.queue.execute("SET", client.queue.key("schema"), NEXT)
            for verb in (client.pop(1, timeout=20), client.enqueue([Task(handler="echo")])):
                with pytest.raises(TooOld, match="upgrade this installation"):
                    await verb
            await client.ack(batch)
            assert await client.queue.execute("HGET", client.queue.key("counts"), "acked") == b"1"
            await client.queue.execute("SET", client.queue.key("schema"), SCHEMA)
    with pytest.raises(TooOld):
        late = RolloutClient(config=config)
        await late.queue.execute("SET", late.queue.key("schema"), NEXT)
        async with contextlib.aclosing(late._client):
            await late.open()


def test_a_worker_and_a_command_that_are_too_old_say_so(redis_service: RedisService) -> None:
    with redis_service.client_sync() as client:
        client.set("{rollout}:schema", NEXT)
        said = f"has schema {NEXT}, this version reads {READS}: upgrade this installation"
        for words in (("depth",), ("schema",), ("schema", "raise", "--force")):
            result = call(redis_service, *words)
            assert (result.exit_code, said in result.output) == (1, True)
        command = [sys.executable, "-m", "workers.cli", *where(redis_service), "work", "run"]
        worker = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (worker.returncode, said in worker.stderr) == (1, True)
        assert client.get("{rollout}:schema") == str(NEXT).encode()
        assert not client.exists("{rollout}:workers")
        told = call(redis_service, "doctor").output
        assert f"it has schema {NEXT}" in " ".join(told.split())


def test_the_schema_is_shown_and_raised(redis_service: RedisService) -> None:
    def shown() -> dict[str, object]:
        return dict(json.loads(call(redis_service, "schema", "--json").stdout))

    assert shown()["line"] is None, "who only looks gives a line no number"
    with redis_service.client_sync() as client:
        client.set("{rollout}:schema", OLDEST_SCHEMA)
    assert (shown()["line"], shown()["writes"], shown()["members"]) == (OLDEST_SCHEMA, SCHEMA, [])
    text = call(redis_service, "schema").output
    assert f"schema {OLDEST_SCHEMA}" in text and "`rollout schema raise` lets the line have it" in text
    told = json.loads(call(redis_service, "schema", "raise", "--json").stdout)
    assert told == {"before": OLDEST_SCHEMA, "now": SCHEMA, "too_old": []}
    again = call(redis_service, "schema", "raise")
    assert (again.exit_code, again.stdout) == (0, f"the line has schema {SCHEMA}\n")
