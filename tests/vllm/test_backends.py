"""Several real servers behind one line: one misses an update, one dies, one has no token path, one is served by us."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete, PolicyError
from pipeline.results import Rollout
from tests.integration.crew import serving
from tests.vllm import servers
from tests.vllm.compare import actions_of, against_record, runs_of
from tests.vllm.play import LONG, until
from tests.vllm.recorder import Exchange, Recorder, recording
from tests.vllm.servers import MODEL, MODELS, WINDOW, Served

SMALL: dict[str, Any] = {"num_gpu_blocks_override": "64", "max_num_seqs": "16"}
IN_WORK = 16
"""Rollouts that the traffic keeps in the line."""


class Traffic:
    """A trainer that keeps the line full, and keeps what it popped."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.popped: list[Rollout] = []
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        sent = 0
        while not self._stop.is_set() or len(self.popped) < sent:
            if not self._stop.is_set() and (wanted := IN_WORK - (sent - len(self.popped))) > 0:
                data = {"question": "Go on for a while.", "turns": 3}
                sampling = {**LONG, "max_tokens": 64}
                await self.client.enqueue(
                    [Task(handler="vllm_handlers:Chat", data=data, sampling=sampling)], samples=wanted
                )
                sent += wanted
            await self._pop(sent - len(self.popped))

    async def _pop(self, left: int) -> None:
        try:
            batch = await self.client.pop(min(left, 4), timeout=1.0)
        except Incomplete as error:
            batch = error.batch
        self.popped.extend(batch)
        await self.client.ack(batch)

    async def more(self, count: int) -> None:
        """Wait for so many rollouts more."""
        wanted = len(self.popped) + count
        while len(self.popped) < wanted:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.05)

    async def end(self) -> list[Rollout]:
        """No new ones; all that were sent are waited for."""
        self._stop.set()
        await self._task
        return self.popped


@contextlib.asynccontextmanager
async def traffic(client: RolloutClient) -> AsyncIterator[Traffic]:
    running = Traffic(client)
    try:
        yield running
    finally:
        running._task.cancel()
        await asyncio.gather(running._task, return_exceptions=True)


@contextlib.asynccontextmanager
async def fronted(servers_: list[Served]) -> AsyncIterator[list[Recorder]]:
    """A recorder before each."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(recording(server.url)) for server in servers_]


def record_of(recorders: list[Recorder], rollout: Rollout) -> list[Exchange]:
    """What went over the wire for it, in order."""
    found = [exchange for recorder in recorders for exchange in recorder.of(rollout.id)]
    return sorted(found, key=lambda exchange: exchange.began)


def check(rollouts: list[Rollout], recorders: list[Recorder]) -> None:
    """All scored, and every id as recorded."""
    assert {(rollout.outcome, rollout.failure) for rollout in rollouts} == {("scored", None)}
    for rollout in rollouts:
        assert against_record(rollout, record_of(recorders, rollout))[1:] == (0, 0)


def started(name: str, count: int, folder: Path, **changes: Any) -> list[Served]:
    """So many servers of a model, started at the same time."""
    made = [servers.launch(name, folder, **changes) for _ in range(count)]
    try:
        return [servers.ready(server) for server in made]
    except BaseException:
        for server in made:
            server.stop()
        raise


@pytest.fixture(scope="module")
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """As many tiny servers as the test says."""
    made = started("tiny", request.param, tmp_path_factory.mktemp("tiny"), **SMALL)
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def config(line: Callable[..., Config]) -> Config:
    """A line whose policy servers register themselves."""
    return line("", "tiny", policy__probe_every=1.0, policy__probe_timeout=12.0)


TWO_AND_FOUR = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("several", TWO_AND_FOUR, indirect=True)
async def test_a_server_that_missed_an_update_samples_nothing_more_with_old_weights(
    several: list[Served], config: Config
) -> None:
    """It is out of reach while the others get new weights. When it is back it is given them before it gets a call."""
    async with fronted(several) as recorders, RolloutClient(config=config) as client, serving(config, slots=32):
        ids = [await client.register_backend(recorder.url) for recorder in recorders]
        await client.start_run(1, path=MODELS / "tiny")
        async with traffic(client) as running:
            await until(lambda: all(len(recorder.calls) > 8 for recorder in recorders), "all servers are in use")
            recorders[-1].go_away()
            update = await client.update_weights(2, path=MODELS / "tiny-2")
            updated = time.time()
            assert set(update.updated) == set(ids[:-1]) and set(update.ejected) == {ids[-1]}
            await running.more(IN_WORK)
            recorders[-1].come_back()
            served = len(recorders[-1].calls)
            await until(lambda: len(recorders[-1].calls) >= served + 4, "the last server is in use again", 90)
            await running.more(IN_WORK)
            rollouts = await running.end()
        assert len(set(map(weights_of, several))) == 1
    check(rollouts, recorders)
    late = [(turn, runs_of(sequence, turn)) for rollout in rollouts for sequence, turn in actions_of(rollout)]
    versions = {version for turn, runs in late if turn.started > updated for version, _, _ in runs}
    assert versions == {2}
    answered = [exchange for recorder in recorders for exchange in recorder.calls if exchange.answer is not None]
    after = [exchange for exchange in answered if exchange.began > updated and exchange.status == 200]
    assert {version for exchange in after for version, _, _ in exchange.versions or []} == {2}, "nor was one refused"
    assert {rollout.trajectory.version_range for rollout in rollouts if rollout.trajectory} <= {(1, 1), (1, 2), (2, 2)}


@pytest.mark.parametrize("several", TWO_AND_FOUR, indirect=True)
async def test_weights_change_under_running_calls(several: list[Served], config: Config) -> None:
    """`keep`: calls that run at an update hold tokens of both versions, each labelled as the engine says."""
    async with fronted(several) as recorders, RolloutClient(config=config) as client, serving(config, slots=32):
        ids = [await client.register_backend(recorder.url) for recorder in recorders]
        await client.start_run(1, path=MODELS / "tiny")
        async with traffic(client) as running:
            for version, name in ((2, "tiny-2"), (3, "tiny"), (4, "tiny-2")):
                await running.more(4)
                update = await client.update_weights(version, path=MODELS / name, mode="keep")
                assert set(update.updated) == set(ids) and not update.ejected
            await running.more(4)
            rollouts = await running.end()
    check(rollouts, recorders)
    ranges = [rollout.trajectory.version_range for rollout in rollouts if rollout.trajectory]
    assert {version for pair in ranges if pair for version in pair} == {1, 2, 3, 4}
    assert any(pair and pair[0] != pair[1] for pair in ranges)


@pytest.mark.parametrize("several", [2], indirect=True)
async def test_weights_that_do_not_load_stop_no_server(several: list[Served], config: Config, tmp_path: Path) -> None:
    """vLLM's engine does not survive a token after a load that failed: the old weights must come first."""
    (tmp_path / "notes.txt").write_text("no weights here")
    async with fronted(several) as recorders, RolloutClient(config=config) as client, serving(config, slots=32):
        for recorder in recorders:
            await client.register_backend(recorder.url)
        await client.start_run(1, path=MODELS / "tiny")
        async with traffic(client) as running:
            await running.more(4)
            with pytest.raises(PolicyError, match="no policy server took weights 2"):
                await client.update_weights(2, path=tmp_path)
            await running.more(2 * IN_WORK)
            rollouts = await running.end()
    check(rollouts, recorders)
    assert {rollout.trajectory.version_range for rollout in rollouts if rollout.trajectory} == {(1, 1)}


@pytest.mark.parametrize("several", [2], indirect=True)
async def test_an_engine_that_is_killed_fails_no_rollout(several: list[Served], config: Config) -> None:
    """What it had is repeated on the other one."""
    async with fronted(several) as recorders, RolloutClient(config=config) as client, serving(config, slots=32):
        for recorder in recorders:
            await client.register_backend(recorder.url)
        await client.start_run(1, path=MODELS / "tiny-2")
        async with traffic(client) as running:
            await killed_at_work(several[1], recorders)
            await running.more(2 * IN_WORK)
            rollouts = await running.end()
    check(rollouts, recorders)
    assert any(exchange.cut or exchange.status == 500 for exchange in recorders[1].calls), "it had no work"
    assert {rollout.trajectory.version_range for rollout in rollouts if rollout.trajectory} == {(1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("several", [2], indirect=True)
async def test_a_server_that_was_started_again_gets_the_weights_in_force(several: list[Served], config: Config) -> None:
    """At the address of one that was killed: it has the weights of its start, and gets no call with those."""
    async with fronted(several) as recorders, RolloutClient(config=config) as client, serving(config, slots=32):
        for server in several:
            await asyncio.to_thread(again, server)
        for recorder in recorders:
            await client.register_backend(recorder.url)
        await client.start_run(1, path=MODELS / "tiny-2")
        async with traffic(client) as running:
            await killed_at_work(several[1], recorders)
            await asyncio.to_thread(again, several[1])
            served, back = len(recorders[1].calls), time.time()
            await until(lambda: len(recorders[1].calls) >= served + 8, "the new server is in use", 90)
            rollouts = await running.end()
        assert len(set(map(weights_of, several))) == 1
    check(rollouts, recorders)
    labels = [exchange.versions for exchange in recorders[1].calls if exchange.began > back and exchange.answer]
    assert {version for runs in labels for version, _, _ in runs or []} == {1}
    assert {rollout.trajectory.version_range for rollout in rollouts if rollout.trajectory} == {(1, 1)}


async def killed_at_work(server: Served, recorders: list[Recorder]) -> None:
    """SIGKILL for its engine, when all servers are in use and this one samples."""
    await until(lambda: all(len(recorder.calls) > 8 for recorder in recorders), "all servers are in use")
    await until(lambda: server.metric("num_requests_running"), "it has work")
    server.engine().kill()
    await until(lambda: not server.healthy(), "it knows that its engine is gone")


def again(server: Served) -> None:
    """Start it anew at its address, where it was killed."""
    if server.healthy():
        return
    server.stop()
    server.process = servers.launch("tiny", server.log.parent, port=int(server.url.rsplit(":", 1)[1]), **SMALL).process
    servers.ready(server)


def weights_of(server: Served) -> str:
    """What tells one set of weights from another: the likeliest continuation of some prompt."""
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    body = {"model": MODEL, "token_ids": list(range(300, 340)), "sampling_params": sampling}
    return str(server.call("/inference/v1/generate", body)["choices"][0]["token_ids"])


@pytest.mark.slow
async def test_a_server_without_the_token_path_serves_by_completions(line: Any, tmp_path: Path) -> None:
    """Chosen by asking it; ids as recorded, the version that of dispatch."""
    (server,) = await asyncio.to_thread(started, "tiny", 1, tmp_path, **SMALL, enable_scale_out=None)
    try:
        async with recording(server.url) as proxy:
            config = line(proxy.url, "tiny")
            async with RolloutClient(config=config) as client, serving(config, slots=32), traffic(client) as running:
                await running.more(IN_WORK)
                rollouts = await running.end()
    finally:
        server.stop()
    check(rollouts, [proxy])
    assert {exchange.path for exchange in proxy.exchanges if exchange.status == 200} == {"/v1/completions"}
    assert {rollout.trajectory.version_range for rollout in rollouts if rollout.trajectory} == {(0, 0)}


@pytest.mark.slow
async def test_rollout_serve_starts_registers_and_strikes_off(config: Config, tmp_path: Path) -> None:
    """Its server plays, takes an update, and is gone from the registry when it is told to end."""
    with served_by_us(config, tmp_path) as process:
        assert process.stdout is not None
        said = await asyncio.to_thread(process.stdout.readline)
        assert said, (tmp_path / "serve.log").read_text()[-3000:]
        id = json.loads(said)["id"]
        async with RolloutClient(config=config) as client, serving(config, slots=32):
            assert [backend.id for backend in (await client.policy()).backends] == [id]
            async with traffic(client) as running:
                await running.more(4)
                update = await client.update_weights(3, path=MODELS / "tiny-2")
                assert update.updated == (id,)
                await running.more(4)
                rollouts = await running.end()
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0
            assert not (await client.policy()).backends
    assert {(rollout.outcome, rollout.failure) for rollout in rollouts} == {("scored", None)}
    assert max(rollout.trajectory.version_range or (0, 0) for rollout in rollouts if rollout.trajectory)[1] == 3


@contextlib.contextmanager
def served_by_us(config: Config, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`rollout serve` of a tiny model, with no flags but those that keep it small; vLLM ends with it."""
    environment = {name: value for name, value in servers.environment().items() if name != "VLLM_SERVER_DEV_MODE"}
    environment |= {
        "ROLLOUT_REDIS__URL": config.redis.url, "ROLLOUT_REDIS__PASSWORD_FILE": config.redis.password_file,
        "ROLLOUT_POLICY__MODEL": MODEL, "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    small = {f"--{name.replace('_', '-')}": value for name, value in SMALL.items()}
    command = [sys.executable, "-m", "workers.cli", "serve", str(MODELS / "tiny"), "--json"]
    command += ["--vllm", str(servers.VENV / "bin" / "vllm"), "--", "--enforce-eager", "--max-model-len", str(WINDOW)]
    command += [word for pair in small.items() for word in pair]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=folder, env=environment)
    with process:
        try:
            yield process
        finally:
            process.kill()
