"""A dataset's way into the line: a Parquet file, a mapping in the settings, tasks as workers and trainers see them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
import yaml
from click.testing import CliRunner
from pyarrow import parquet

from pipeline.client import RolloutClient
from pipeline.datasets import read_tasks
from pipeline.envelope import Task, decode_compressed
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService
from workers.cli.app import rollout

SAYS = {
    "handler": "echo",
    "id": "{source}-{about.number}",
    "fields": {"text": "says.-1.content"},
    "limits": {"run": 9.0},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"datasets": {"says": SAYS}}))
    rows = [
        {"source": "s", "says": [{"content": f"hello {at}"}], "about": {"number": at}, "weight": [0.5] * 100}
        for at in range(1200)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "says.parquet", row_group_size=100)
    return tmp_path


def call(service: RedisService, *words: str) -> Any:
    where = [f"--set=redis.url={service.url}", f"--set=redis.password_file={service.password_file}"]
    return CliRunner().invoke(rollout, [*where, *words])


async def task_of(service: RedisService, group: str) -> Task:
    async with RolloutClient(config=service.config) as client:
        data = await client.queue.read_task(group)
        assert data is not None
        return decode_compressed(Task, data)


def test_parquet_rows_become_rollouts(redis_service: RedisService, folder: Path) -> None:
    done = call(redis_service, "enqueue", "says.parquet", "--dataset", "says", "--samples", "2", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["tasks"], told["rollouts"]) == (1200, 2400) and told["ids"][:3] == ["s-0.0", "s-0.1", "s-1.0"]
    assert asyncio.run(task_of(redis_service, "s-1199")) == Task(
        handler="echo", id="s-1199", data={"text": "hello 1199"}, limits={"run": 9.0}
    )


def test_a_bad_row_behind_good_ones_enqueues_nothing(redis_service: RedisService, folder: Path) -> None:
    refused = call(redis_service, "enqueue", "says.parquet", "--dataset", "says", "--handler", "math")
    assert refused.exit_code == 1
    assert "says.parquet, row 0: Math: field 'question' is missing" in refused.stderr
    asked = call(redis_service, "enqueue", "says.parquet")
    assert asked.exit_code == 1 and "its columns are of no known kind (about, says, source, weight)" in asked.stderr
    depth = json.loads(call(redis_service, "depth", "--json").stdout)
    assert depth["init"]["ready"]["train"] == 0


def test_what_was_validated_travels(redis_service: RedisService, folder: Path) -> None:
    validated = {"line": "rollout", "handler": "x", "seconds": 1.5}
    line = {"handler": "echo", "id": "v", "data": {"text": "v"}, "validated": validated}
    (folder / "good.jsonl").write_text(json.dumps(line))
    assert call(redis_service, "enqueue", "good.jsonl").exit_code == 0
    assert asyncio.run(task_of(redis_service, "v")).validated == validated


async def test_a_trainer_reads_the_same_tasks(redis_service: RedisService, folder: Path) -> None:
    config = configured(redis_service)
    async with RolloutClient(config=config) as client, serving(config):
        rollouts = await all_of(client, [*read_tasks("says.parquet", dataset="says", rows=(100, None), limit=3)])
    assert [(item.id, item.state["answer"]) for item in rollouts] == [
        (f"s-{at}.0", f"hello {at}") for at in (100, 101, 102)
    ]
