"""The trainer's side on a real server: what it gets, when it gets less, and what happens to what it holds."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete, MemoryHigh, QueueFull, RedisUnavailable, TaskError
from tests import line
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service)


def echo(**data: Any) -> Task:
    return Task(handler="echo", data={"tokens": 64, **data})


def bad(name: str, log: Path, **data: Any) -> Task:
    return Task(handler=f"fault_handlers:{name}", data={"tokens": 64, "starts": str(log), **data})


async def test_tasks_go_in_and_scored_trajectories_come_out(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        ids = await client.enqueue([echo(text="a"), echo(text="b")], samples=2)
        batch = await client.pop(4, timeout=20)

        assert sorted(rollout.id for rollout in batch) == sorted(ids)
        for rollout in batch:
            assert (rollout.outcome, rollout.reward, rollout.failure) == ("scored", 1.0, None)
            assert rollout.trajectory is not None
            assert len(rollout.trajectory) == 64
            assert [record["outcome"] for record in rollout.attempts] == ["committed"] * 3
        await client.ack(batch)
        await client.ack(batch)
        assert await audit(client.queue) == []
        assert await line.leftovers(client.queue) == []


async def test_less_than_asked_says_how_much_which_and_why(config: Config) -> None:
    """Eight are wanted; seven come; the caller is told, and gets no short list."""
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([echo()], samples=7)
        (slow,) = await client.enqueue([echo(sleep=20.0)])

        with pytest.raises(
            Incomplete, match=r"7 of 8 rollouts came within 3 s: 1 outstanding.*in work in run"
        ) as caught:
            await client.pop(8, timeout=3)

        error = caught.value
        assert (error.wanted, error.got, len(error.batch)) == (8, 7, 7)
        assert all(rollout is not None for rollout in error.batch)
        assert list(error.missing) == [slow]
        await client.ack(error.batch)
        await client.cancel([slow])
        (last,) = await client.pop(1, timeout=10)
        assert (last.outcome, last.reward) == ("cancelled", None)


async def test_no_worker_is_said_with_the_mend(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        await client.enqueue([echo()], samples=3)
        with pytest.raises(
            Incomplete, match=r"0 of 3 .*3 init: no live worker serves it .*rollout work init"
        ) as caught:
            await client.pop(3, timeout=0.2)
        assert len(caught.value.missing) == 3


async def test_nothing_in_flight_is_said(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        with pytest.raises(Incomplete, match="nothing more is in flight in lane 'train'"):
            await client.pop(1, timeout=0.1)
        with pytest.raises(Incomplete, match="0 of 2 groups"):
            await client.pop_groups(2, timeout=0.1)


async def test_a_failed_member_takes_no_group_down(config: Config, tmp_path: Path) -> None:
    """H07 (a)."""
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([bad("Merging", tmp_path / "starts")], samples=4)
        await client.enqueue([echo()], samples=4)

        first, second = await client.pop_groups(2, timeout=20)

        by_sample = {rollout.sample: rollout for rollout in first.rollouts}
        assert [by_sample[sample].outcome for sample in range(4)] == ["scored", "scored", "scored", "failed"]
        failure = by_sample[3].failure
        assert failure is not None
        assert (failure.kind, failure.stage) == ("handler", "run")
        assert "KeyError" in failure.why
        assert "merge" in failure.why
        assert "Traceback" in failure.log
        assert by_sample[3].reward is None
        assert len(second.scored) == 4
        await client.ack([first, second])


@pytest.mark.parametrize("where", ["init", "run"])
async def test_a_failure_of_the_infrastructure_is_no_reward(config: Config, tmp_path: Path, where: str) -> None:
    """H08: true rewards 1, 0, 1; the fourth meets a sandbox that does not start, or a policy that is not there."""
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([bad("Rewarding", tmp_path / "a", text=where)], samples=4)
        await client.enqueue([bad("Rewarding", tmp_path / "b", text=f"{where} all")], samples=4)

        some, none = await client.pop_groups(2, timeout=20)

        rewards = {rollout.sample: rollout.reward for rollout in some.rollouts}
        assert rewards == {0: 1.0, 1: 0.0, 2: 1.0, 3: None}
        assert some.mean == pytest.approx(2 / 3)
        failed = next(rollout for rollout in some.rollouts if rollout.sample == 3)
        assert failed.failure is not None
        assert failed.failure.kind == {"init": "sandbox", "run": "policy"}[where]
        assert [record["outcome"] for record in failed.attempts if record["stage"] == where] == ["failed"] * 3
        assert (len(none.rollouts), len(none.scored), none.mean) == (4, 0, None)
        await client.ack([some, none])


async def test_a_trainer_that_dies_before_its_ack_gets_the_same_again(redis_service: RedisService) -> None:
    config = configured(redis_service, lease__done_seconds=1.0)
    async with serving(config):
        first = RolloutClient(config=config)
        await first.open()
        await first.enqueue([echo()], samples=4)
        before = await first.pop(4, timeout=20)
        assert first._consumer._keeper is not None
        first._consumer._keeper._ending.set()  # its process is gone: nothing keeps its leases, nothing is given back
        async with RolloutClient(config=config) as second:
            after = await second.pop(4, timeout=20)
            assert {rollout.id for rollout in after} == {rollout.id for rollout in before}
            for rollout in after:
                twin = next(other for other in before if other.id == rollout.id)
                assert rollout.trajectory is not None
                assert twin.trajectory is not None
                assert rollout.trajectory.to_wire()["sequences"][0]["token_ids"].tolist() == (
                    twin.trajectory.to_wire()["sequences"][0]["token_ids"].tolist()
                )
            await second.ack(after)
            assert await line.leftovers(second.queue) == []
        first._consumer._keeper = None
        await first.close()


async def test_what_is_popped_is_kept_while_the_trainer_trains(redis_service: RedisService) -> None:
    config = configured(redis_service, lease__done_seconds=1.0)
    async with serving(config), RolloutClient(config=config) as client, RolloutClient(config=config) as other:
        await client.enqueue([echo()])
        batch = await client.pop(1, timeout=20)
        with pytest.raises(Incomplete):
            await other.pop(1, timeout=2.5)
        await client.ack(batch)
        assert await line.count(client.queue, "acked") == 1


async def test_what_is_not_acked_is_given_back_when_the_client_closes(config: Config) -> None:
    async with serving(config), RolloutClient(config=config) as second:
        async with RolloutClient(config=config) as first:
            await first.enqueue([echo()], samples=2)
            await first.pop(2, timeout=20)
        assert len(await second.pop(2, timeout=5)) == 2


async def test_a_pop_that_is_cancelled_gives_back_what_it_held(config: Config) -> None:
    async with serving(config), RolloutClient(config=config) as client:
        await client.enqueue([echo()], samples=2)
        popping = asyncio.create_task(client.pop(3))
        while await line.count(client.queue, "scored") < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        popping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await popping
        assert len(await client.pop(2, timeout=5)) == 2


async def test_a_server_that_came_back_empty_is_given_the_work_again(
    config: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.consumer.ASK_EVERY", 0.2)
    async with RolloutClient(config=config) as client:
        ids = await client.enqueue([echo()], samples=4)
        async with serving(config, "init", "run", "eval"):
            have = await client.pop(1, timeout=20)
        await client.queue.execute("FLUSHALL")
        async with serving(config):
            rest = await client.pop(3, timeout=20)
            assert {rollout.id for rollout in [*have, *rest]} == set(ids), "what the trainer has is not made once more"
            await client.ack(rest)
            await client.ack(have)
            with pytest.raises(Incomplete, match="nothing more is in flight"):
                await client.pop(1, timeout=1.0)
        assert "3 rollouts were unknown to the server" in caplog.text
        assert await line.leftovers(client.queue) == []


async def test_an_acked_rollout_is_not_enqueued_again(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        task = Task(handler="echo", id="mine")
        await all_of(client, [task], samples=2)
        assert await client.enqueue([task], samples=2) == ["mine.0", "mine.1"]
        assert await line.count(client.queue, "enqueued") == 2


async def test_a_full_line_is_refused_and_waited_for(redis_service: RedisService) -> None:
    config = configured(redis_service, line__max_length=3)
    async with RolloutClient(config=config) as client:
        await client.enqueue([echo()], samples=2)
        with pytest.raises(QueueFull, match="2 rollouts, at most line.max_length = 3"):
            await client.enqueue([echo()], samples=2)
        waiting = asyncio.create_task(client.enqueue([echo()], samples=2, wait=20.0))
        async with serving(config):
            await client.ack(await client.pop(2, timeout=20))
            assert len(await waiting) == 2
            await client.ack(await client.pop(2, timeout=20))


async def test_above_the_memory_mark_nothing_is_enqueued(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        used, limit = await client.queue.memory()
        await client.queue.execute("CONFIG", "SET", "maxmemory", int(used * 1.2))
        try:
            with pytest.raises(MemoryHigh, match=r"above memory.high = 0.75"):
                await client.enqueue([echo()])
        finally:
            await client.queue.execute("CONFIG", "SET", "maxmemory", limit)
        assert await line.count(client.queue, "enqueued") == 0


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Task(handler=5), r"Task.handler is 5, a int"),  # type: ignore[arg-type]
        (Task(handler="echo", data=[1]), r"Task.data is \[1\], a list"),  # type: ignore[arg-type]
        (Task(handler="echo", data={"x": {1, 2}}), r"a set can't travel"),
        (Task(handler="echo", data={"x": 2**70}), r"a int can't travel"),
        (Task(handler="echo", limits={"run": "1h"}), r"Task.limits\['run'\] is '1h', wanted a number"),  # type: ignore[dict-item]
        (Task(handler="echo", limits={"run": -1}), r"Task.limits\['run'\] is -1"),
        (Task(handler="echo", id="a\nb"), r"Task.id is 'a\\nb', wanted 1 to 200 printable"),
        (Task(handler="echo", id=""), r"Task.id is ''"),
        (Task(handler="echo", deadline=float("nan")), r"Task.deadline is nan"),
    ],
)
async def test_a_task_that_no_worker_could_read_is_refused_with_nothing_enqueued(
    config: Config, task: Task, sentence: str
) -> None:
    async with RolloutClient(config=config) as client:
        with pytest.raises(TaskError, match=sentence):
            await client.enqueue([echo(), task])
        assert await line.count(client.queue, "enqueued") == 0


async def test_bad_arguments_are_sentences(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        with pytest.raises(TaskError, match=r"lane 'fast' is unknown \(known: train, eval\)"):
            await client.enqueue([echo()], lane="fast")
        with pytest.raises(TaskError, match="samples is 0"):
            await client.enqueue([echo()], samples=0)
        with pytest.raises(TaskError, match="priority is 2000000"):
            await client.enqueue([echo()], priority=2_000_000)


async def test_bytes_that_do_not_decode_end_as_a_record(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        (id,) = await client.enqueue([echo()])
        await client.queue.execute("HSET", client.queue.key("r", id), "env", b"\xc1 no envelope")
        async with serving(config):
            (rollout,) = await client.pop(1, timeout=20)
        assert (rollout.outcome, rollout.reward) == ("failed", None)
        assert rollout.failure is not None
        assert rollout.failure.kind == "envelope"
        assert await client.queue.execute("HGET", client.queue.key("letter", id), "env") == b"\xc1 no envelope"
        await client.ack([rollout])


async def test_a_payload_that_is_gone_is_a_failure_and_no_empty_trajectory(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        (id,) = await client.enqueue([echo()])
        while await line.state(client.queue, id) != ("done", "ready"):
            await asyncio.sleep(0.02)
        await client.queue.execute("DEL", client.queue.key("p", id, await line.field(client.queue, id, "payload")))
        (rollout,) = await client.pop(1, timeout=5)
        assert (rollout.outcome, rollout.reward) == ("failed", None)
        assert rollout.failure is not None
        assert "is not there" in rollout.failure.why
        await client.ack([rollout])


async def test_a_deadline_ends_what_is_in_work(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        task = Task(handler="echo", data={"sleep": 30.0}, deadline=time.time() + 3.0)
        (rollout,) = await all_of(client, [task], timeout=20)
        assert (rollout.outcome, rollout.reward) == ("failed", None)
        assert rollout.failure is not None
        assert rollout.failure.kind == "limit"
        assert "deadline passed while it was in run" in rollout.failure.why


async def test_status_counts(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        await all_of(client, [echo()], samples=3)
        status = await client.status()
        assert {name: status["counts"][name] for name in ("enqueued", "acked", "live", "scored")} == {
            "enqueued": 3, "acked": 3, "live": 0, "scored": 3,
        }  # fmt: skip
        assert sorted(worker["stage"] for worker in status["workers"]) == ["eval", "init", "run"]


async def test_an_ack_that_comes_too_late_is_told(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        (id,) = await client.enqueue([echo()])
        batch = await client.pop(1, timeout=20)
        await line.silence(client.queue, "done", id)
        await asyncio.sleep(0.6)
        with caplog.at_level(logging.WARNING):
            await client.ack(batch)
        assert f"rollout {id} was acked after its lease had run out" in caplog.text


async def test_a_pop_ends_in_time_though_redis_is_away(redis_server: RedisService) -> None:
    config = configured(redis_server, redis__socket_timeout=0.5)
    async with RolloutClient(config=config) as client:
        os.kill(redis_server.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(RedisUnavailable, match="Redis does not answer"):
                await client.pop(1, timeout=0.5)
            assert time.monotonic() - began < 4.0
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        with pytest.raises(Incomplete):
            await client.pop(1, timeout=0.1)


async def test_what_this_client_holds_is_not_called_missing(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([echo()], samples=2)
        held = await client.pop(2, timeout=20)
        with pytest.raises(Incomplete, match="nothing more is in flight") as caught:
            await client.pop(1, timeout=0.1)
        assert caught.value.missing == {}
        await client.ack(held)


async def test_a_pop_that_is_cancelled_while_it_reads_gives_its_leases_back(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the leases run out: another trainer must not wait a minute for them."""
    reads = asyncio.Event()

    async def slow(*_: object) -> None:
        reads.set()
        await asyncio.Event().wait()

    async with RolloutClient(config=config) as client, RolloutClient(config=config) as other, serving(config):
        await client.enqueue([echo(), echo()], samples=2)
        with monkeypatch.context() as patched:
            patched.setattr("pipeline.consumer.read_all", slow)
            popping = asyncio.create_task(client.pop_groups(2, timeout=20))
            await reads.wait()
            popping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await popping
        groups = await other.pop_groups(2, timeout=20)
        assert [len(group.scored) for group in groups] == [2, 2]
        await other.ack(groups)
