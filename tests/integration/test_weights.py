"""New weights against scripted servers and a real Redis: both forms, who is left behind, a trainer that dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from pipeline import Group, Rollout, RolloutClient, SyncRolloutClient, Task
from pipeline.backends import Backend, Load, state_of
from pipeline.config import Config
from pipeline.engine import Engine, EngineError
from pipeline.envelope import SCHEMA, Payload, encode_compressed
from pipeline.errors import ConfigError, Incomplete, PolicyError
from pipeline.trajectory import Sequence, Trajectory, Turn, VersionRun
from pipeline.weights import Weights, bring_up
from pipeline.wire import pack
from tests import line
from tests.integration.crew import serving
from tests.policies import until
from tests.services import RedisService
from workers.policy import scripted, tokenizer
from workers.policy.scripted import Options, Running

HERE = Path(__file__).parent
QUESTION = "What is 6 x 7?"
LONG = "the answer is forty-two, " * 8


@pytest.fixture
def config(redis_service: RedisService, tokens: tokenizer.Tokenizer) -> Config:
    return redis_service.config.changed(
        {
            "handlers.path": str(HERE), "policy.tokenizer": tokens.name_or_path, "limits.grace": 1.0,
            "policy.update_timeout": 5.0, "policy.request_timeout": 10.0,
        }
    )  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[int], str]:
    """Where the weights of a version lie."""

    def folder(version: int) -> str:
        path = tmp_path / f"weights-{version}"
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").touch()
        return str(path)

    return folder


class Site:
    """Servers `a`, `b`, ... that are registered, and a trainer's client."""

    def __init__(self, client: RolloutClient, servers: dict[str, Running]) -> None:
        self.client, self.servers = client, servers

    async def backend(self, id: str) -> Backend:
        return next(item for item in (await self.client.policy()).backends if item.id == id)

    async def goes_on(self) -> bool:
        return not (await self.client.policy()).policy.paused

    async def state(self, id: str) -> str:
        view = await self.client.policy()
        return state_of(await self.backend(id), view.policy)[0]


@contextlib.asynccontextmanager
async def site(config: Config, tokens: tokenizer.Tokenizer, count: int = 2, **options: Any) -> AsyncIterator[Site]:
    """`options`: of all servers, or of one as {"b": {...}}."""
    async with contextlib.AsyncExitStack() as stack:
        servers = {}
        client = await stack.enter_async_context(RolloutClient(config=config))
        for name in "abcd"[:count]:
            own = {key: value for key, value in options.items() if len(key) > 1} | options.get(name, {})
            server = await scripted.start(Options(tokenizer=tokens, answers={QUESTION: LONG}, **own))
            stack.push_async_callback(server.stop)
            await client.backends.add(Backend(id=name, url=server.url))
            servers[name] = server
        yield Site(client, servers)


@pytest.fixture
async def two(config: Config, tokens: tokenizer.Tokenizer) -> AsyncIterator[Site]:
    async with site(config, tokens) as found:
        yield found


# -- both forms ------------------------------------------------------------------------------------------------------


async def test_the_servers_load_a_folder(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.start_run(1, path=folders(1))
    update = await two.client.update_weights(5, path=folders(5))
    assert (update.version, sorted(update.updated), update.ejected) == (5, ["a", "b"], {})
    for id, server in two.servers.items():
        assert server.engine.loaded == [folders(1), folders(5)]
        assert (server.engine.label, server.engine.paused) == ("5", False)
        assert (await two.backend(id)).version == 5
    policy = (await two.client.policy()).policy
    assert (policy.version, policy.path, policy.updates, policy.paused) == (5, folders(5), 1, "")


async def test_what_a_failed_load_ends_is_ended_when_all_workers_know(
    two: Site, folders: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that does not know of the pause asks the same server for the rest at once, and vLLM dies of a token."""
    await two.client.start_run(1, path=folders(1))
    backends, before = two.client.backends, (await two.client.policy()).policy.pauses
    await backends.exchange("a worker", {}, before)

    async def fails(*_: object, **__: object) -> None:
        raise EngineError("refused", "no weights there")

    monkeypatch.setattr(Engine, "load", fails)
    update = asyncio.create_task(two.client.update_weights(2, path=folders(2)))
    engines = [server.engine for server in two.servers.values()]
    await until(lambda: all(engine.paused for engine in engines))
    for _ in range(50):
        pauses = (await two.client.policy()).policy.pauses
        assert all(engine.paused for engine in engines) and not update.done()
    await backends.exchange("a worker", {}, pauses)
    with pytest.raises(PolicyError, match="no policy server took weights 2"):
        await update
    assert not any(engine.paused for engine in engines)


async def test_the_first_update_begins_without_a_start(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.update_weights(3, path=folders(3))
    policy = (await two.client.policy()).policy
    assert (policy.version, policy.updates, policy.bound) == (3, 0, None)


async def test_a_start_without_weights_names_those_that_are_there(two: Site) -> None:
    await two.client.start_run(7)
    assert {server.engine.label for server in two.servers.values()} == {"7"}
    assert [item.version for item in (await two.client.policy()).backends] == [7, 7]


async def test_the_trainer_moves_the_weights(two: Site) -> None:
    seen: list[Any] = []

    async def move(servers: tuple[Backend, ...]) -> None:
        view = await two.client.policy()
        seen.append(sorted(server.url for server in servers))
        seen.append([item.version for item in view.backends])
        seen.append((view.policy.target, view.policy.mode, bool(view.policy.paused)))
        seen.append([server.engine.paused for server in two.servers.values()])

    await two.client.start_run(1)
    update = await two.client.update_weights(2, move=move, mode="abort")
    urls = sorted(server.url for server in two.servers.values())
    assert seen == [urls, [None, None], (2, "abort", True), [True, True]]
    assert sorted(update.updated) == ["a", "b"]
    assert [server.engine.label for server in two.servers.values()] == ["2", "2"]
    policy = (await two.client.policy()).policy
    assert (policy.version, policy.path) == (2, "")


async def nothing(servers: object) -> None:
    """A move that is never begun."""


async def test_a_folder_without_weights_is_refused_before_anything_is_paused(two: Site, tmp_path: Path) -> None:
    await two.client.start_run(1)
    for path in (tmp_path / "gone", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=f"no weights lie in {path}"):
            await two.client.update_weights(2, path=path)
    assert (await two.client.policy()).policy.pauses == 1, "the start of the run"


async def test_pause_and_resume_by_hand(two: Site) -> None:
    await two.client.start_run(1)
    assert sorted(server.id for server in await two.client.pause()) == ["a", "b"]
    with pytest.raises(PolicyError, match="call `resume` first"):
        await two.client.update_weights(2, move=nothing)
    with pytest.raises(PolicyError, match="versions only rise"):
        await two.client.resume(1)
    assert (await two.client.policy()).policy.paused
    assert (await two.client.resume(2)).version == 2
    assert [item.version for item in (await two.client.policy()).backends] == [2, 2]


async def test_a_pause_in_which_nothing_moved(two: Site) -> None:
    await two.client.start_run(1)
    await two.client.pause()
    assert [item.version for item in (await two.client.policy()).backends] == [None, None]
    update = await two.client.resume()
    assert (update.version, sorted(update.updated)) == (1, ["a", "b"])
    assert [item.version for item in (await two.client.policy()).backends] == [1, 1]
    assert not any(server.engine.paused for server in two.servers.values())


async def test_another_trainer_must_wait(two: Site, config: Config) -> None:
    await two.client.start_run(1)
    await two.client.pause()
    async with RolloutClient(config=config) as other:
        with pytest.raises(PolicyError, match=f"{two.client.name} has paused the policy"):
            await other.update_weights(2, move=nothing)
    await two.client.resume()


# -- running calls ---------------------------------------------------------------------------------------------------


async def call(server: Running, max_tokens: int = 64) -> dict[str, Any]:
    """One request of 64 tokens at 10 ms each, as a worker sends it."""
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": max_tokens, "logprobs": 0}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + "/inference/v1/generate", json=body) as got,
    ):
        return dict((await got.json())["choices"][0])


async def running(server: Running) -> None:
    await until(lambda: server.engine.running)
    await asyncio.sleep(0.1)  # some tokens of the old version


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_what_running_calls_do(
    config: Config, tokens: tokenizer.Tokenizer, folders: Callable[[int], str], mode: Any
) -> None:
    async with site(config, tokens, 1, latency_per_token=0.04) as one:
        await one.client.start_run(1, path=folders(1))
        reply = asyncio.create_task(call(one.servers["a"]))
        await running(one.servers["a"])
        await one.client.update_weights(2, path=folders(2), mode=mode)
        choice = await reply
    spans = [span["version"] for span in choice["weight_versions"]]
    assert spans == {"keep": ["1", "2"], "wait": ["1"], "abort": ["1"]}[mode]
    assert (choice["finish_reason"] == "abort") == (mode == "abort")


async def test_a_server_without_control_side_is_waited_for(config: Config, tokens: tokenizer.Tokenizer) -> None:
    async with site(config, tokens, 1, dev_mode=False) as one:
        await one.client.start_run(1)
        assert (await one.backend("a")).endpoint == "completions", "its labels never change: they mean nothing"
        await one.client.backends.exchange("w", {"a": Load(10, 1, 1.0)}, 99)
        pausing = asyncio.create_task(one.client.pause())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(pausing), 0.3)
        await one.client.backends.exchange("w", {}, 99)
        assert [server.id for server in await pausing] == ["a"]
        assert (await one.client.resume(2)).updated == ("a",)
        assert (await one.backend("a")).version == 2


# -- who is left behind ----------------------------------------------------------------------------------------------


async def test_a_server_that_does_not_take_them_is_named_and_gets_no_calls(
    config: Config, tokens: tokenizer.Tokenizer, folders: Callable[[int], str]
) -> None:
    async with site(config, tokens, 3, b={"dev_mode": False}) as three:
        await three.client.start_run(1)
        await three.servers["c"].stop()
        update = await three.client.update_weights(2, path=folders(2))
        assert update.updated == ("a",)
        assert "VLLM_SERVER_DEV_MODE=1" in update.ejected["b"]
        assert sorted(update.ejected) == ["b", "c"]
        assert [await three.state(id) for id in "abc"] == ["ready", "behind", "behind"]
        assert "did not take weights 2" in (await three.backend("c")).why


async def test_where_none_takes_them_the_old_ones_go_on(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.start_run(1)
    await two.servers["b"].stop()
    two.servers["a"].face.dev_mode = False
    with pytest.raises(
        PolicyError, match=r"no policy server took weights 2 \(a: .*; b: .*\); the old ones stay in force"
    ):
        await two.client.update_weights(2, path=folders(2))
    policy = (await two.client.policy()).policy
    assert (policy.version, policy.paused, policy.updates) == (1, "", 0)
    assert [await two.state(id) for id in "ab"] == ["ready", "ready"], "their weights were not touched"


async def test_weights_that_nobody_knows_sample_no_token(
    config: Config, tokens: tokenizer.Tokenizer, folders: Callable[[int], str]
) -> None:
    async with site(config, tokens, 2, latency_per_token=0.01) as two:
        await two.client.start_run(1)
        reply = asyncio.create_task(call(two.servers["a"]))
        await running(two.servers["a"])

        async def move(servers: tuple[Backend, ...]) -> None:
            raise RuntimeError("a rank is gone")

        with pytest.raises(RuntimeError, match="a rank is gone"):
            await two.client.update_weights(2, move=move)
        assert (await reply)["finish_reason"] == "abort"
        assert [await two.state(id) for id in "ab"] == ["behind", "behind"]
        assert not any(server.engine.paused for server in two.servers.values())
        assert (await two.client.update_weights(2, path=folders(2))).ejected == {}


async def test_a_drained_server_gets_them_but_does_not_count(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.start_run(1)
    await two.client.backends.note("a", drained=True)
    assert sorted((await two.client.update_weights(2, path=folders(2))).updated) == ["a", "b"]
    await two.client.backends.remove("b")
    with pytest.raises(PolicyError, match="no policy server took weights 3"):
        await two.client.update_weights(3, path=folders(3))


async def test_an_update_waits_for_a_worker_that_knows_nothing_of_the_pause(
    two: Site, folders: Callable[[int], str]
) -> None:
    await two.client.start_run(1)
    await two.client.backends.exchange("w", {}, 1)
    updating = asyncio.create_task(two.client.update_weights(2, path=folders(2)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(updating), 0.5)
    view = await two.client.backends.exchange("w", {}, 1)
    assert (view.policy.version, bool(view.policy.paused)) == (1, True)
    await two.client.backends.exchange("w", {}, view.policy.pauses)
    assert (await updating).version == 2


# -- who brings them up ----------------------------------------------------------------------------------------------


async def test_a_server_that_is_behind_is_brought_up(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.start_run(1, path=folders(1))
    await two.client.update_weights(2, path=folders(2))
    await two.client.backends.note("a", version=1)
    engine = Engine(two.servers["a"].url)
    async with engine:
        assert await bring_up(two.client.backends, "a", engine)
        assert await bring_up(two.client.backends, "a", engine), "it has them already"
    assert two.servers["a"].engine.loaded[-1] == folders(2)
    assert await two.state("a") == "ready"


async def test_one_that_does_not_take_them_says_why(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.start_run(2, path=folders(2))
    await two.client.backends.note("a", version=1)
    shutil.rmtree(folders(2))
    async with Engine(two.servers["a"].url) as engine:
        with pytest.raises(EngineError, match="is no folder"):
            await bring_up(two.client.backends, "a", engine)
    assert not two.servers["a"].engine.paused
    assert "did not take weights 2" in (await two.backend("a")).why
    assert (await two.backend("a")).version is None


async def test_a_trainer_that_died_in_the_middle(two: Site, folders: Callable[[int], str]) -> None:
    await two.client.start_run(1, path=folders(1))
    dead = Weights(two.client.backends, "dead", life=0.3)
    await dead.pause()
    async with Engine(two.servers["a"].url) as engine:
        assert not await bring_up(two.client.backends, "a", engine), "its pause still holds"
        await until(two.goes_on)
        assert [await two.state(id) for id in "ab"] == ["behind", "behind"]
        await dead.part()  # its process is gone, and its locks with it
        assert await bring_up(two.client.backends, "a", engine)
    assert await two.state("a") == "ready"
    assert not two.servers["a"].engine.paused
    assert (await two.client.update_weights(2, path=folders(2))).ejected == {}


async def test_a_trainer_that_is_killed_while_weights_move(two: Site, config: Config) -> None:
    arguments = [sys.executable, "-m", "tests.integration.dying_trainer", config.redis.url, config.redis.password_file]
    trainer = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE, cwd=HERE.parents[1])
    assert trainer.stdout is not None
    assert (await asyncio.wait_for(trainer.stdout.readline(), 30)).strip() == b"moving"
    trainer.kill()
    await trainer.wait()
    assert all(server.engine.paused for server in two.servers.values())
    assert [item.version for item in (await two.client.policy()).backends] == [None, None]
    update = await two.client.start_run(1)
    assert (sorted(update.updated), update.ejected) == (["a", "b"], {})
    assert not any(server.engine.paused for server in two.servers.values())
    assert [await two.state(id) for id in "ab"] == ["ready", "ready"]


async def test_a_trainer_that_comes_back_waits_for_the_end_of_its_old_pause(two: Site, config: Config) -> None:
    await two.client.start_run(1)
    dead = Weights(two.client.backends, "dead", life=0.3)
    await dead.pause()
    await dead.part()
    async with RolloutClient(config=config) as trainer:
        assert sorted((await trainer.start_run(1)).updated) == ["a", "b"]
    person = Weights(two.client.backends, "person")
    await person.pause(moving=False)
    with pytest.raises(PolicyError, match="person has paused the policy"):
        await two.client.start_run(2)
    await person.resume()


async def test_a_pause_is_kept_alive_by_a_thread(config: Config, tokens: tokenizer.Tokenizer) -> None:
    async with site(config.changed({"lease.done_seconds": 0.6}), tokens, 1) as one:
        await one.client.start_run(1)
        await one.client.pause()
        ends = [await one.client.queue.execute("HGET", one.client.queue.key("policy"), "pause_until")]
        async with asyncio.timeout(5):
            while len(ends) < 4:
                now = await one.client.queue.execute("HGET", one.client.queue.key("policy"), "pause_until")
                ends += [now] if now != ends[-1] else []
                await asyncio.sleep(0.02)
        assert (await one.client.policy()).policy.paused
        await one.client.resume(2)


async def test_a_trainer_that_leaves_in_a_pause_lets_the_line_go_on(
    two: Site, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutClient(config=config) as trainer:
        await trainer.start_run(1)
        await trainer.pause()
    assert "leaves while it pauses the policy" in caplog.text
    assert not (await two.client.policy()).policy.paused
    assert not any(server.engine.paused for server in two.servers.values())
    assert [await two.state(id) for id in "ab"] == ["behind", "behind"], "nobody knows what was moved"


async def test_a_person_ends_a_pause_of_another_process(two: Site) -> None:
    await two.client.start_run(1)
    person = Weights(two.client.backends, "person")
    await person.pause(moving=False)
    await person.part()
    assert [item.version for item in (await two.client.policy()).backends] == [1, 1]
    other = Weights(two.client.backends, "other")
    await other.adopt()
    await other.resume()
    assert [await two.state(id) for id in "ab"] == ["ready", "ready"]
    assert not any(server.engine.paused for server in two.servers.values())


# -- what the trainer pops -------------------------------------------------------------------------------------------


def payload(*versions: int) -> bytes:
    """A trajectory with one token of each version."""
    size = len(versions)
    sequence = Sequence(
        token_ids=np.arange(size, dtype=np.uint32), loss_mask=np.ones(size, np.uint8),
        logprobs=np.zeros(size, np.float32),
        versions=tuple(VersionRun(version, at, at + 1) for at, version in enumerate(versions)),
        turns=(Turn(kind="action", start=0, end=size),),
    )  # fmt: skip
    return encode_compressed(Payload(trajectory=Trajectory(sequences=(sequence,))), SCHEMA)


async def scored(client: RolloutClient, group: str, *members: tuple[int, ...]) -> None:
    """A finished group, each member sampled by these versions."""
    await line.put(client.queue, group, samples=len(members))
    for versions in members:
        claim = await line.one(client.queue)
        await line.pass_on(client.queue, claim, "init")
        await line.pass_on(client.queue, await line.one(client.queue, "run"), "run", payload=payload(*versions))
        result = pack({"reward": 1.0})
        await line.pass_on(client.queue, await line.one(client.queue, "eval"), "eval", result=result)


@pytest.fixture
async def trainer(config: Config, request: pytest.FixtureRequest) -> AsyncIterator[RolloutClient]:
    """A client whose weights were updated to 2; no update older than that is tolerated."""
    stale = getattr(request, "param", "mark")
    async with RolloutClient(config=config.changed({"policy.stale": stale})) as client:
        await client.backends.start(1, "", max_staleness=0, lane="train")
        await client.backends.pause("t", 60.0, "weights", "keep", 2)
        await client.backends.commit("t", 2, "")
        yield client


async def test_stale_rollouts_are_marked(trainer: RolloutClient) -> None:
    await scored(trainer, "g", (1, 2), (2,))
    batch = await trainer.pop(2, timeout=5)
    found = {rollout.sample: (rollout.staleness, rollout.stale, rollout.versions) for rollout in batch}
    assert found == {0: (1, True, (1, 2)), 1: (0, False, (2, 2))}
    await trainer.ack(batch)
    assert (await trainer.policy()).policy.popped == 2, "marked ones count: the trainer chose"


@pytest.mark.parametrize("trainer", ["drop"], indirect=True)
async def test_stale_rollouts_are_dropped_on_the_way(trainer: RolloutClient, caplog: pytest.LogCaptureFixture) -> None:
    await scored(trainer, "old", (1,), (1,))
    await scored(trainer, "new", (2,))
    with caplog.at_level(logging.WARNING):
        (rollout,) = batch = await trainer.pop(1, timeout=5)
    assert rollout.id == "new.0"
    assert "of lane train 2 rollouts were dropped: too stale by max_staleness (up to 1 updates old)" in caplog.text
    await trainer.ack(batch)
    policy = (await trainer.policy()).policy
    assert (policy.popped, policy.dropped) == (1, 2)
    assert await line.count(trainer.queue, "dropped") == 2
    with pytest.raises(Incomplete, match="nothing more is in flight"):
        await trainer.pop(1, timeout=0.1)


@pytest.mark.parametrize("trainer", ["drop"], indirect=True)
async def test_a_group_is_dropped_whole(trainer: RolloutClient) -> None:
    await scored(trainer, "mixed", (2,), (1,), (2,))
    await scored(trainer, "fresh", (2,), (2,))
    groups: list[Group] = await trainer.pop_groups(1, timeout=5)
    assert [group.id for group in groups] == ["fresh"]
    await trainer.ack(groups)
    policy = (await trainer.policy()).policy
    assert (policy.popped, policy.dropped) == (2, 3)
    assert [name for name in await line.leftovers(trainer.queue) if name != "started:train"] == []


@pytest.mark.parametrize("trainer", ["drop"], indirect=True)
async def test_of_groups_that_are_popped_together_only_the_stale_one_is_dropped(trainer: RolloutClient) -> None:
    for name, version in (("first", 2), ("mixed", 1), ("last", 2)):
        await scored(trainer, name, (2,), (version,))
    groups = await trainer.pop_groups(2, timeout=5)
    assert [(group.id, len(group.scored)) for group in groups] == [("first", 2), ("last", 2)]
    assert await line.count(trainer.queue, "dropped") == 2


# -- with workers ----------------------------------------------------------------------------------------------------


def asks(count: int) -> list[Task]:
    data = {"question": QUESTION}
    return [Task(handler="weight_handlers:Ask", id=f"ask-{n}", data=data, sampling={"seed": n}) for n in range(count)]


async def test_an_update_in_mid_rollout_is_recorded_at_its_token(
    config: Config, tokens: tokenizer.Tokenizer, folders: Callable[[int], str]
) -> None:
    """And from its end on, a server that was left behind gets no call any more."""
    async with site(config, tokens, 2, latency_per_token=0.01) as two, serving(config):
        await two.client.start_run(1, path=folders(1), batch=64, max_staleness=4)
        await two.client.enqueue(asks(8))
        for server in two.servers.values():
            await running(server)
        two.servers["b"].face.dev_mode = False
        update = await two.client.update_weights(2, path=folders(2))
        assert (update.updated, sorted(update.ejected)) == (("a",), ["b"])
        before = two.servers["b"].engine.counts.copy()
        left = len(two.servers["b"].engine.calls)
        await two.client.enqueue([Task(handler=item.handler, id=f"new-{item.id}", data=item.data) for item in asks(8)])
        rollouts: list[Rollout] = list(await two.client.pop(16, timeout=30))
        assert {rollout.outcome for rollout in rollouts} == {"scored"}
        assert sum(rollout.versions == (1, 2) for rollout in rollouts) >= 1
        assert {rollout.versions for rollout in rollouts if rollout.id.startswith("new-")} == {(2, 2)}
        assert {rollout.staleness for rollout in rollouts} <= {0, 1}
        after = two.servers["b"].engine.counts
        finished = [name for name in after if name.startswith("finished")]
        assert sum(after[name] - before[name] for name in finished) <= left
        await two.client.ack(rollouts)
        assert (await two.client.policy()).policy.bound == (4 + 1 + 1) * 64 - 16


async def test_the_bound_holds_with_workers_and_updates_let_more_begin(
    config: Config, tokens: tokenizer.Tokenizer, folders: Callable[[int], str]
) -> None:
    async with site(config, tokens, 1) as one, serving(config):
        await one.client.start_run(0, path=folders(0), batch=2, max_staleness=0)
        await one.client.enqueue(asks(4))
        trained = 0
        for version in (1, 2):
            batch = await one.client.pop(2, timeout=20)
            assert {rollout.staleness for rollout in batch} == {0}
            if version == 1:
                with pytest.raises(Incomplete, match="for weights: 2 of 2 rollouts are begun and not acked"):
                    await one.client.pop(1, timeout=0.5)
            await one.client.ack(batch)
            trained += len(batch)
            await one.client.update_weights(version, path=folders(version))
        assert trained == 4


# -- without asyncio -------------------------------------------------------------------------------------------------


@pytest.fixture
def server_process(tokens: tokenizer.Tokenizer, tmp_path: Path) -> Iterator[scripted.Launched]:
    launched = scripted.launch(tmp_path, "--tokenizer", tokens.name_or_path)
    try:
        yield launched
    finally:
        launched.stop()


def test_the_sync_client_moves_on_the_callers_thread(config: Config, server_process: scripted.Launched) -> None:
    threads: list[str] = []

    def move(servers: tuple[Backend, ...]) -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 2:
            raise RuntimeError("a rank is gone")

    with SyncRolloutClient(config=config) as trainer:
        id = trainer.register_backend(server_process.url)
        trainer.start_run(1)
        assert trainer.update_weights(2, move=move).updated == (id,)
        with pytest.raises(RuntimeError, match="a rank is gone"):
            trainer.update_weights(3, move=move)
        assert [server.id for server in trainer.pause()] == [id]
        assert trainer.resume(4).version == 4
        with pytest.raises(PolicyError, match="versions only rise"):
            trainer.update_weights(4, move=move)
        assert trainer.policy().policy.version == 4
    assert threads == [threading.current_thread().name] * 2
