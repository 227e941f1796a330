"""Continuous feeding on a real line: batches of exactly the wanted size, what is in flight, what is thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.datasets import Reader, read_lines
from pipeline.envelope import Task
from pipeline.errors import ConfigError, Incomplete
from pipeline.groups import GroupPolicy
from pipeline.inspect import depth
from pipeline.results import Group
from pipeline.sync_client import SyncRolloutClient
from tests import line
from tests.integration.crew import configured, serving
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service)


def echoes(count: int, **data: Any) -> list[Task]:
    return [Task(handler="echo", data={"text": str(number), "tokens": 16, **data}) for number in range(count)]


def valued(*rewards: float, **data: Any) -> Task:
    return Task(handler="stream_handlers:Valued", data={"rewards": list(rewards), "tokens": 16, **data})


def texts(groups: list[Group]) -> list[str]:
    return [group.rollouts[0].state["answer"] for group in groups]


async def in_line(client: RolloutClient) -> int:
    """Rollouts that wait at INIT; no worker runs."""
    return int((await depth(client.queue))["init"]["ready"]["train"])


async def test_batches_come_whole_and_the_line_holds_so_many_ahead(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        stream = client.stream(echoes(10), samples=2, batch=3, ahead=1, name="s", epochs=1)
        asking = asyncio.create_task(anext(stream))
        async with serving(config):
            first = await asking
        assert [group.id for group in first] == ["s-0-0", "s-0-1", "s-0-2"]
        assert all(len(group.rollouts) == 2 for group in first)
        assert stream.in_flight == 3, "one batch is under way while the trainer has the first"
        assert await line.count(client.queue, "enqueued") == 12
        await client.ack(first)

        batches = []
        async with serving(config):
            async for groups in stream:
                batches.append(groups)
                await client.ack(groups)
        assert [len(groups) for groups in batches] == [3, 3, 1], "the last one is what is left"
        assert texts([*first, *(group for groups in batches for group in groups)]) == [str(n) for n in range(10)]
        assert (stream.stats.yielded, stream.stats.refused, stream.in_flight) == (10, 0, 0)
        assert await line.leftovers(client.queue) == []


@pytest.mark.ci
async def test_ahead_0_is_synchronous(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(4), samples=1, batch=2, ahead=0)
        for _ in range(3):
            groups = await anext(stream)
            assert stream.in_flight == 0
            await client.ack(groups)


async def test_each_epoch_has_an_order_of_its_own_and_ends(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        orders = []
        for _ in range(2):
            stream = client.stream(echoes(8), batch=8, ahead=0, seed=7, epochs=2)
            epochs = []
            async for groups in stream:
                epochs.append(sorted(groups, key=lambda group: int(group.id.rpartition("-")[2])))
                await client.ack(groups)
            orders.append([texts(groups) for groups in epochs])
        assert orders[0] == orders[1], "the seed decides"
        assert orders[0][0] != orders[0][1]
        assert [sorted(order) for order in orders[0]] == [sorted(map(str, range(8)))] * 2


async def test_a_dataset_is_read_once_and_keeps_its_ids(config: Config) -> None:
    rows = [json.dumps({"handler": "echo", "id": f"row-{n}", "data": {"text": str(n)}}) for n in range(5)]
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(read_lines(rows, Reader()), batch=2, ahead=1, name="s")
        ids = []
        async for groups in stream:
            ids += [group.id for group in groups]
            await client.ack(groups)
        assert sorted(ids) == [f"s-0-{n}-row-{n}" for n in range(5)]
        with pytest.raises(ConfigError, match="the tasks are an iterator, which is read once"):
            client.stream(read_lines(rows, Reader()), batch=2, seed=1)


async def test_refused_groups_are_replaced_until_the_batch_is_full(config: Config) -> None:
    tasks = [
        valued(1.0, 1.0),
        valued(0.0, 1.0),
        valued(-1.0, 1.0),
        valued(0.5, 0.0),
        valued(0.0, 0.0),
        valued(1.0, 0.0),
    ]
    async with RolloutClient(config=config) as client, serving(config):
        await client.start_run(1, batch=6, max_staleness=0)
        stream = client.stream(tasks, samples=2, batch=3, ahead=0, keep="spread", name="s", epochs=1)
        batch = await anext(stream)

        assert sorted(group.id for group in batch) == ["s-0-1", "s-0-3", "s-0-5"]
        assert dict(stream.stats.reasons) == {
            "all rewards equal 1.0": 1,
            "one scored member": 1,
            "all rewards equal 0.0": 1,
        }
        assert (stream.stats.refused, stream.stats.failed, stream.in_flight) == (3, 1, 0)
        policy = (await client.policy()).policy
        assert (policy.popped, policy.dropped) == (0, 5), "what was thrown away does not count as trained on"
        await client.ack(batch)
        assert await line.leftovers(client.queue) == []


async def test_nothing_worth_keeping_ends_with_a_sentence(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream([valued(1.0)], samples=2, batch=1, keep="spread")
        with pytest.raises(
            Incomplete,
            match=r"0 of 1 groups were worth keeping: 1\d groups were refused by keep='spread': "
            r"1\d with all rewards equal 1.0",
        ) as caught:
            await anext(stream)
        assert (caught.value.batch, caught.value.wanted, caught.value.got) == ([], 1, 0)


@pytest.mark.ci
async def test_what_is_too_stale_is_replaced_too(redis_service: RedisService) -> None:
    config = configured(redis_service, policy__stale="drop")
    async with RolloutClient(config=config) as client, serving(config):
        await client.start_run(5, batch=2, max_staleness=0)  # echo's tokens bear version 0
        stream = client.stream(echoes(1), batch=2, ahead=0)
        with pytest.raises(
            Incomplete, match=r"0 of 2 groups were worth keeping: 2\d groups .* a rollout that is too stale"
        ):
            await anext(stream)
        assert stream.in_flight <= 2


@pytest.mark.ci
async def test_a_keep_of_ones_own_that_raises_loses_nothing(config: Config) -> None:
    broken = True

    def mine(group: Group) -> bool:
        if broken:
            raise KeyError("mine")
        return True

    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(2), batch=2, ahead=0, keep=mine, epochs=1)
        with pytest.raises(KeyError, match="mine"):
            await anext(stream)
        broken = False
        assert len(await anext(stream)) == 2


async def test_seven_of_eight_are_told_with_the_id_of_the_missing_one(config: Config) -> None:
    """Not a list of seven, and no None in a list; what came is the front of the next batch, but for what is acked."""
    tasks = [*echoes(7), Task(handler="echo", data={"sleep": 6.0})]
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(tasks, batch=8, ahead=0, epochs=1, name="s", timeout=3.0)
        with pytest.raises(
            Incomplete, match=r"7 of 8 groups came within 3 s: 1 outstanding: 1 in work in run"
        ) as caught:
            await anext(stream)
        assert list(caught.value.missing) == ["s-0-7.0"]
        assert sorted(group.id for group in caught.value.batch) == [f"s-0-{number}" for number in range(7)]

        used = caught.value.batch[0]
        await client.ack(used)
        rest: list[Group] = []
        while not rest:
            with contextlib.suppress(Incomplete):
                rest = await anext(stream)
        assert {group.id for group in rest} == {f"s-0-{number}" for number in range(8)} - {used.id}


@pytest.mark.ci
async def test_a_cancelled_wait_loses_nothing(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(6, sleep=0.3), batch=6, ahead=0, epochs=1)
        for wait in (0.1, 0.35, 0.4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(wait):
                    await anext(stream)
                    raise TimeoutError  # it was quick: as good
            if stream.stats.yielded:
                return
        groups = await anext(stream)
        assert len({group.id for group in groups}) == 6


async def test_late_members_come_in_a_later_batch_and_are_marked(config: Config) -> None:
    policy = GroupPolicy(extra=1, usable=2, rest="later")
    tasks = [valued(0.0, 1.0, 0.5, slow=1.5), *echoes(3)]
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(tasks, samples=2, batch=1, ahead=0, groups=policy, name="s", epochs=1)
        late: list[Group] = []
        async for (group,) in stream:
            if group.id == "s-0-0" and not group.late:
                assert sorted(rollout.reward or 0.0 for rollout in group.scored) == [0.5, 1.0]
                await asyncio.sleep(0)
            late += [group] if group.late else []
            await client.ack(group)
            while group.id == "s-0-2" and not late and int((await depth(client.queue))["done"]["ready"]["train"]) < 1:
                await asyncio.sleep(0.02)
        assert [(group.id, [rollout.stale for rollout in group.rollouts]) for group in late] == [("s-0-0", [True])]
        assert stream.stats.late == 1


async def test_pause_holds_the_run(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(4), batch=1, ahead=0)
        await client.ack(await anext(stream))
        await stream.pause("weights are being looked at")
        asking = asyncio.create_task(anext(stream))
        done, _ = await asyncio.wait({asking}, timeout=0.5)
        assert not done
        assert "weights are being looked at" in (await depth(client.queue))["init"]["paused"]["train"]
        await stream.resume()
        await client.ack(await asyncio.wait_for(asking, 20))


@pytest.mark.ci
async def test_what_is_not_acked_goes_back_with_the_client(config: Config) -> None:
    async with serving(config):
        async with RolloutClient(config=config) as client:
            async with client.stream(echoes(1), batch=1, ahead=0, name="s", epochs=1) as stream:
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        async with RolloutClient(config=config) as client:
            (group,) = await client.pop_groups(1, timeout=5)
            assert group.id == "s-0-0"
            await client.ack(group)


@pytest.mark.ci
async def test_a_full_line_is_fed_as_it_empties(redis_service: RedisService) -> None:
    config = configured(redis_service, line__max_length=2)
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(5), batch=1, ahead=3, epochs=1)
        count = 0
        async for groups in stream:
            count += len(groups)
            await client.ack(groups)
        assert count == 5


async def test_a_state_goes_on_where_it_was(config: Config) -> None:
    """In flight, yielded and acked, yielded and not acked, not fed yet: each task is trained on once."""
    seen: list[str] = []
    async with serving(config):
        async with RolloutClient(config=config) as client:
            stream = client.stream(echoes(9), batch=2, ahead=1, seed=3, epochs=1)
            first = await anext(stream)
            await client.ack(first)
            second = await anext(stream)
            seen += texts(first) + texts(second)
            state = json.loads(json.dumps(stream.state_dict()))
        assert state["trained"] == sorted(group.id for group in second), "the checkpoint has them in its weights"
        async with RolloutClient(config=config) as client:
            stream = client.stream(echoes(9), batch=2, ahead=1, seed=3, epochs=1)
            stream.load_state_dict(state)
            async for groups in stream:
                seen += texts(groups)
                await client.ack(groups)
            assert stream.stats.again == 0
        assert sorted(seen) == [str(number) for number in range(9)]
        assert await left(config) == []


async def test_what_the_weights_do_not_know_is_said_to_the_state(config: Config) -> None:
    async with serving(config):
        async with RolloutClient(config=config) as client:
            stream = client.stream(echoes(2), batch=2, ahead=0, epochs=1, name="s")
            batch = await anext(stream)
            state = stream.state_dict(untrained=batch)
        async with RolloutClient(config=config) as client:
            stream = client.stream(echoes(2), batch=2, ahead=0, epochs=1)
            stream.load_state_dict(state)
            assert sorted(group.id for group in await anext(stream)) == ["s-0-0", "s-0-1"]


@pytest.mark.ci
async def test_an_iterator_goes_on_behind_what_it_gave(config: Config) -> None:
    def tasks() -> Iterator[Task]:
        yield from echoes(5)

    seen: list[str] = []
    async with serving(config):
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks(), batch=1, ahead=1)
            groups = await anext(stream)
            seen += texts(groups)
            await client.ack(groups)
            state = stream.state_dict()
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks(), batch=1, ahead=1)
            stream.load_state_dict(state)
            async for groups in stream:
                seen += texts(groups)
                await client.ack(groups)
        assert sorted(seen) == [str(number) for number in range(5)]


async def left(config: Config) -> list[str]:
    async with RolloutClient(config=config) as client:
        return await line.leftovers(client.queue)


def test_plain_code_has_the_same_stream(redis_service: RedisService) -> None:
    config = configured(redis_service)

    async def crew(ready: asyncio.Event, over: asyncio.Event) -> None:
        async with serving(config):
            ready.set()
            await over.wait()

    loop = asyncio.new_event_loop()
    ready, over = asyncio.Event(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(crew(ready, over),))
    thread.start()
    try:
        with SyncRolloutClient(config=config) as client:
            stream = client.stream(echoes(3), batch=2, ahead=1, epochs=1, name="s")
            sizes = []
            for groups in stream:
                sizes.append(len(groups))
                client.ack(groups)
            assert sizes == [2, 1]
            assert (stream.name, stream.in_flight, stream.stats.yielded) == ("s", 0, 3)
            assert stream.state_dict()["cursor"] is None
            report = client.evaluate(echoes(2))
            assert (report.scored, report.mean) == (2, 1.0)
            stream.close()
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@pytest.mark.parametrize("acked", [False, True])
async def test_a_lease_that_ran_out_while_the_trainer_was_frozen_does_not_train_twice(
    config: Config, acked: bool
) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(4), samples=2, batch=2, ahead=0, epochs=1)
        first = await anext(stream)
        await line.silence(client.queue, "done", *(rollout.id for group in first for rollout in group.rollouts))
        await client.queue.tick()
        if acked:
            await client.ack(first)  # too late: the line gives them out again
        seen = texts(first)
        async for groups in stream:
            seen += texts(groups)
            await client.ack(groups)
        await client.ack(first)
        assert sorted(seen) == [str(number) for number in range(4)]
        assert await line.leftovers(client.queue) == []


async def test_tasks_that_break_off_are_not_taken_for_tasks_that_are_over(config: Config) -> None:
    def tasks() -> Iterator[Task]:
        yield from echoes(3)
        raise OSError("the disk is gone")

    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(tasks(), batch=1, ahead=0)
        for _ in range(3):
            await client.ack(await anext(stream))
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(stream)
        with pytest.raises(ConfigError, match="iterator broke after 3 tasks .OSError: the disk is gone"):
            await anext(stream)
        assert stream.state_dict()["cursor"] == [0, 3]


async def test_an_end_without_a_batch_is_told(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream([valued(-1.0)] * 3, samples=2, batch=4, epochs=1, keep="scored", name="s")
        assert [groups async for groups in stream] == []
    assert "the tasks of stream s are over: 0 groups are its last batch; 3 groups were refused by" in caplog.text


async def test_two_streams_of_one_lane_are_not_asked_at_once(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        one, other = (client.stream(echoes(2), batch=1, name=name) for name in ("one", "other"))
        asking = asyncio.create_task(anext(one))
        await asyncio.sleep(0)
        with pytest.raises(
            ConfigError, match="stream other was asked for a batch of lane 'train' while stream one was"
        ):
            await anext(other)
        await client.ack(await asking)
        await client.ack(await anext(one))


@pytest.mark.ci
async def test_a_state_goes_on_in_the_process_that_has_the_batch_and_with_more_epochs(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(echoes(2), batch=2, ahead=0, epochs=1)
        first = await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        state = stream.state_dict()
        assert state["trained"] == sorted(group.id for group in first)
        for epochs, batches in ((1, 0), (2, 1)):
            again = client.stream(echoes(2), batch=2, ahead=0, epochs=epochs)
            again.load_state_dict(state)
            async with asyncio.timeout(20):
                found = [groups async for groups in again]
            assert len(found) == batches


@pytest.mark.ci
async def test_ids_of_any_length_leave_room(config: Config) -> None:
    tasks = [Task(handler="echo", id="x" * 199 + end) for end in "ab"]
    async with RolloutClient(config=config) as client, serving(config):
        stream = client.stream(tasks, batch=2, epochs=1)
        (groups,) = [groups async for groups in stream]
        assert {len(group.id) for group in groups} == {len(stream.name) + len("-0-0-") + 60}
        await client.ack(groups)
        assert (await client.evaluate([*tasks, *tasks], timeout=20)).scored == 4, "each task is one, whatever its id"


@pytest.mark.ci
async def test_a_group_of_somebody_else_is_told(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([Task(handler="echo", id="left-behind")])
        stream = client.stream(echoes(1), batch=2, epochs=1, name="s")
        assert sorted([group.id async for groups in stream for group in groups]) == ["left-behind", "s-0-0"]
    assert caplog.text.count("which it never fed") == 1
    assert "stream s was given group left-behind" in caplog.text


@pytest.mark.ci
async def test_two_trainers_of_one_dataset_share_a_line(redis_service: RedisService) -> None:
    config = configured(redis_service, line__lanes={"train": 1, "other": 1, "eval": 1})
    tasks = [Task(handler="echo", id="the-same", data={"text": str(number)}) for number in range(4)]
    async with RolloutClient(config=config) as client, serving(config):

        async def run(lane: str) -> list[str]:
            seen = []
            async for groups in client.stream(tasks, batch=2, epochs=1, lane=lane):
                seen += texts(groups)
                await client.ack(groups)
            return sorted(seen)

        async with asyncio.timeout(30):
            one, other = await asyncio.gather(run("train"), run("other"))
        assert one == other == ["0", "1", "2", "3"]


async def test_what_ran_for_weights_that_were_left_is_not_trained_on(config: Config) -> None:
    """A life went on from an older checkpoint, ran tasks anew and died; the next one takes the newer checkpoint."""
    tasks = echoes(3)
    async with serving(config):
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks, batch=1, ahead=0, epochs=1, name="s")
            older = stream.state_dict()
            await client.ack(await anext(stream))
            newer = stream.state_dict()
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks, batch=1, ahead=0, epochs=1)
            stream.load_state_dict(older)
            assert [group.id for group in await anext(stream)] == ["s-0-0~1"]
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks, batch=1, ahead=0, epochs=1)
            stream.load_state_dict(newer)
            seen = []
            async for groups in stream:
                seen += texts(groups)
                await client.ack(groups)
            assert sorted(seen) == ["1", "2"]
            assert dict(stream.stats.reasons) == {"a task that is trained on already": 1}
            assert await line.leftovers(client.queue) == []
