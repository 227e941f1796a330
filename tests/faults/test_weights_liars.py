"""Servers that do not do what they are told, trainers that come to when others have gone on: no label may be false."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends import Backend, Backends, state_of
from pipeline.engine import Engine
from pipeline.envelope import Envelope, Payload, Stage, Task
from pipeline.errors import ConfigError, PolicyError
from pipeline.log import AttemptLog
from pipeline.queue import Queue
from pipeline.weights import Weights, bring_up
from tests.faults import true_policy
from tests.faults.storm_trainer import folder_of
from tests.faults.true_policy import truth
from tests.policies import PROMPT, calls_of, client, known, servers, until
from tests.services import RedisService
from workers.children import Children
from workers.job import Job
from workers.policy.scripted import Running
from workers.policy.tokenizer import Tokenizer
from workers.workshop import close, open_workshop

HERE = Path(__file__).parent


@pytest.fixture
async def backends(redis_service: RedisService) -> AsyncIterator[Backends]:
    settings = {"policy.update_timeout": 3.0, "policy.backend_lease": 1.0, "policy.request_timeout": 10.0}
    async with redis_service.client() as connection:
        yield Backends(Queue(connection, redis_service.config.changed(settings)))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[int], str]:
    return lambda version: folder_of(tmp_path, version)


@contextlib.asynccontextmanager
async def served(backends: Backends, tokens: Tokenizer, id: str = "a", **about: Any) -> AsyncIterator[Running]:
    server = await true_policy.start(tokens, **about)
    await backends.add(Backend(id=id, url=server.url, model="policy"))
    try:
        yield server
    finally:
        await server.stop()


async def state(backends: Backends, id: str = "a") -> str:
    view = await backends.view()
    return state_of(next(item for item in view.backends if item.id == id), view.policy)[0]


async def kept_by(backends: Backends, *owners: str) -> bool:
    return [item.owner for item in (await backends.view()).backends] == [*owners]


async def test_a_trainer_whose_pause_is_over_touches_no_server_any_more(
    backends: Backends, tokens: Tokenizer, folder: Callable[[int], str]
) -> None:
    """It was frozen in the middle of a load, say: by then others may have given the server the old weights back."""
    async with served(backends, tokens, load=1.0) as server:
        await Weights(backends, "t").start(1, path=folder(1))
        with pytest.raises(PolicyError, match=r"silent for too long.*the old ones stay in force"):
            await Weights(backends, "t", life=0.3).update(2, path=folder(2))
        assert (server.engine.label, server.engine.paused, await state(backends)) == ("1", True, "behind")
        async with Engine(server.url) as engine:
            assert await bring_up(backends, "a", engine)
        async with client(tokens, queue=backends._queue) as policy:
            done = await policy.generate(PROMPT, {"max_tokens": 5})
        assert done.versions == [(1, 0, 5)] and {truth(value) for value in done.logprobs} == {1}


async def test_one_who_brings_up_too_slowly_touches_it_no_more(
    backends: Backends, tokens: Tokenizer, folder: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(backends, tokens, load=0.5) as server, Engine(server.url) as engine:
        await Weights(backends, "t").start(1, path=folder(1))
        await backends.note("a", version=0)
        raising = asyncio.create_task(bring_up(backends, "a", engine))
        await until(lambda: server.engine.paused)
        key = backends._queue.key("raise", "a")
        await backends._queue.execute("DEL", key)  # its lease has run out: it was frozen
        update = await Weights(backends, "t").update(2, path=folder(2))
        assert update.updated == ("a",)
        with pytest.raises(PolicyError, match="silent for too long"):
            await raising
        assert (server.engine.label, await state(backends)) == ("2", "ready")


async def test_a_server_that_says_yes_and_does_nothing_is_left_behind(
    backends: Backends, tokens: Tokenizer, folder: Callable[[int], str]
) -> None:
    async with served(backends, tokens), served(backends, tokens, "b") as liar:
        await Weights(backends, "t").start(1, path=folder(1))
        liar.face.no_op = True  # type: ignore[attr-defined]
        update = await Weights(backends, "t").update(2, path=folder(2))
        assert update.updated == ("a",) and "says that it is not paused" in update.ejected["b"]
        assert await state(backends, "b") == "behind"


@pytest.mark.parametrize("version", [-1, True, 2**53 + 1, 1.5])
async def test_versions_that_are_none(backends: Backends, version: Any, folder: Callable[[int], str]) -> None:
    with pytest.raises(ConfigError, match="is no version of weights"):
        await Weights(backends, "t").start(version, path=folder(1))


async def test_the_greatest_version(backends: Backends, tokens: Tokenizer, folder: Callable[[int], str]) -> None:
    async with served(backends, tokens):
        await Weights(backends, "t").start(2**53 - 1, path=folder(1))
        await Weights(backends, "t").update(2**53, path=folder(2))
        assert (await backends.view()).policy.version == 2**53


# -- what the worker takes for true -----------------------------------------------------------------------------------


async def test_an_update_waits_for_calls_that_get_no_labels(
    backends: Backends, tokens: Tokenizer, folder: Callable[[int], str]
) -> None:
    """Frozen, such a call would go on with the new weights, and nobody could tell where they begin."""
    async with (
        served(backends, tokens, scale_out=False, per_token=0.02) as server,
        client(tokens, queue=backends._queue) as policy,
    ):
        await Weights(backends, "t").start(1, path=folder(1))
        call = asyncio.create_task(policy.generate(PROMPT, {"max_tokens": 40}))
        await until(lambda: server.engine.calls and policy.pool.about()["calls"])
        await Weights(backends, "t").update(2, path=folder(2), mode="keep")
        for done, version in ((await call, 1), (await policy.generate(PROMPT, {"max_tokens": 3}), 2)):
            assert [run[0] for run in done.versions] == [version]
            assert {truth(value) for value in done.logprobs} == {version}


@pytest.mark.parametrize(("scale_out", "version"), [(False, 1), (False, 0), (True, 0), (True, 1)])
async def test_a_server_that_came_back_between_two_calls_is_found_out(
    backends: Backends, tokens: Tokenizer, folder: Callable[[int], str], scale_out: bool, version: int
) -> None:
    """Nobody saw it go. Its label, "default", says no version, even where version 0 is in force."""
    async with client(tokens, queue=backends._queue) as policy:
        async with served(backends, tokens, scale_out=scale_out) as server:
            await Weights(backends, "t").start(version, path=folder(version))
            await policy.generate(PROMPT, {"max_tokens": 3})
        again = await true_policy.start(tokens, int(server.url.rpartition(":")[2]), scale_out=scale_out)
        done = await policy.generate(PROMPT, {"max_tokens": 3})
        assert [run[0] for run in done.versions] == [version]
        assert {truth(value) for value in done.logprobs} == {version}
        await again.stop()


async def test_a_worker_that_was_frozen_does_not_trust_a_reply_without_labels(
    backends: Backends, tokens: Tokenizer
) -> None:
    """The trainer did not wait for its call: it was not there any more, as far as anybody could see."""
    async with (
        served(backends, tokens, dev_mode=False, per_token=0.02),
        client(tokens, queue=backends._queue) as policy,
    ):
        await Weights(backends, "t").start(1)
        call = asyncio.create_task(policy.generate(PROMPT, {"max_tokens": 40}))
        await until(lambda: policy.pool.about()["calls"])
        policy.pool.fleet.lapses += 1
        assert [run[0] for run in (await call).versions] == [1]
        assert policy.pool.fleet.counts["repeats refused"] == 1


@pytest.mark.parametrize("fault", ["short_logprobs", "not_json"])
async def test_a_server_whose_replies_are_none_costs_no_call_where_there_is_another(
    tokens: Tokenizer, fault: str
) -> None:
    """It answers at once, and so would draw all calls."""
    async with (
        servers(tokens, {}, {"latency_per_token": 0.005}) as (sick, sound),
        client(tokens, sick, sound) as policy,
    ):
        await policy.ready()
        await until(lambda: known(policy, "up", "up"))
        sick.faults.set(fault)
        done = await asyncio.gather(*(policy.bound().generate(PROMPT, {}) for _ in range(20)))
        assert len(done) == 20 and calls_of(sound) == 20


async def test_one_server_has_one_id(backends: Backends) -> None:
    await backends.add(Backend(id="a", url="http://127.0.0.1:9/"))
    assert (await backends.view()).backends[0].url == "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match="registered already, as a"):
        await backends.add(Backend(id="b", url="http://127.0.0.1:9"))


async def test_a_server_that_policy_url_names_and_the_registry_too_is_one(
    backends: Backends, tokens: Tokenizer
) -> None:
    async with (
        served(backends, tokens, "named") as server,
        client(tokens, server, queue=backends._queue) as policy,
    ):
        await policy.generate(PROMPT, {"max_tokens": 3})
        assert [item.id for item in policy.pool.fleet.usable()] == ["named"]
        await backends.remove("named")
        await until(lambda: [item.id for item in policy.pool.fleet.usable()] == [server.url.removeprefix("http://")])
        await until(lambda: kept_by(backends, "config"))


async def test_a_rollout_that_runs_alone_heeds_the_weights_in_force(
    redis_service: RedisService, backends: Backends, tokens: Tokenizer
) -> None:
    """In a child process of its own, which once knew neither versions nor pauses."""
    config = redis_service.config.changed({"handlers.path": str(HERE), "policy.tokenizer": tokens.name_or_path})
    job = Job(
        stage=Stage.RUN, id="g.0", token="t", attempt=1, payload=Payload(),
        envelope=Envelope(id="g.0", group="g", handler="storm_handlers:Talk"), task=Task(handler="storm_handlers:Talk"),
    )  # fmt: skip
    shop = await open_workshop(config, str(HERE), queue=backends._queue, worker="w")
    assert isinstance(shop.children, Children)
    try:
        async with served(backends, tokens, "old") as old, served(backends, tokens, "new"):
            await Weights(backends, "t").start(1)
            await backends.note("old", version=0)
            done = await shop.children.stage(job, 60.0, AttemptLog(logging.getLogger("handler")))
            assert done.payload is not None and done.payload.trajectory is not None
            assert done.payload.trajectory.version_range == (1, 1)
            assert old.engine.counts["prompt"] < 40, "none but probes"
    finally:
        await close(shop)
