"""`rollout serve` as a process, with a stand-in for vLLM (tests/scripted_vllm.py): it registers, watches, cleans up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.backends import Backend, Backends
from pipeline.queue import Queue
from tests.services import RedisService
from tests.waiting import sleepers, until
from workers.policy.tokenizer import Tokenizer

STAND_IN = Path(__file__).parents[1] / "scripted_vllm.py"


class Served:
    """One `rollout serve`, its stand-in for vLLM and that one's engine process."""

    def __init__(self, service: RedisService, folder: Path, model: Path, *words: str) -> None:
        self.engine = f"{random.randint(10**6, 10**8)}.5"
        program = folder / "vllm"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
        program.chmod(0o755)
        self.log = folder / "log"
        settings = {
            "redis.url": service.url, "redis.password_file": service.password_file, "limits.grace": 5.0,
            "policy.probe_every": 0.2, "policy.probe_timeout": 0.5, "policy.backend_lease": 2.0, "policy.vllm": program,
        }  # fmt: skip
        command = [sys.executable, "-m", "workers.cli", *(f"--set={name}={value}" for name, value in settings.items())]
        command += ["--log-level=debug", "serve", str(model), "--json", *words, *(() if "--" in words else ("--",))]
        command += ["--engine-sleep", self.engine]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=STAND_IN.parents[1])

    def ready(self) -> Backend:
        """What it registered, once it has."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        return Backend(**{**json.loads(line), "ends": 0.0})

    def said(self) -> str:
        return self.log.read_text()

    def server(self) -> psutil.Process:
        (engine,) = sleepers(self.engine)
        parent = engine.parent()
        assert parent is not None
        return parent

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def model(tokens: Tokenizer) -> Path:
    """All that a scripted server wants of a model's folder."""
    return Path(tokens.name_or_path)


@contextlib.contextmanager
def serving(service: RedisService, folder: Path, model: Path, *words: str) -> Iterator[Served]:
    served = Served(service, folder, model, *words)
    try:
        yield served
    finally:
        served.end()
        until(lambda: not sleepers(served.engine))


async def registered(service: RedisService) -> dict[str, Backend]:
    async with service.client() as client:
        return {found.id: found for found in (await Backends(Queue(client, service.config)).view()).backends}


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


async def test_it_registers_what_generates_and_takes_it_away_in_good_order(
    redis_service: RedisService, tmp_path: Path, model: Path
) -> None:
    async with redis_service.client() as client:
        await Backends(Queue(client, redis_service.config)).start(4, str(model))  # the weights in force lie there
    words = ("--id", "one", "--", "--latency-per-token", "0.1", "--max-model-len", "300")
    with serving(redis_service, tmp_path, model, *words) as served:
        said = served.ready()
        (found,) = (await registered(redis_service)).values()
        assert (found.id, found.version, found.window, found.endpoint) == ("one", 4, 300, "generate")
        assert (found.model, found.tokenizer, found.kind, found.drained) == ("policy", str(model), "vllm", False)
        assert found.url == said.url and found.url.startswith("http://127.0.0.1:")
        assert found.owner.endswith(f"-{served.process.pid}")

        post(f"{said.url}/pause?mode=keep", {})
        until(lambda: served.said().count("vLLM is paused") > 2)  # it generates nothing, and is not taken for hung
        post(f"{said.url}/resume", {})

        asked = {"token_ids": [5], "sampling_params": {"max_tokens": 10}}
        call = subprocess.Popen(
            [sys.executable, "-c", CALL, f"{said.url}/inference/v1/generate", json.dumps(asked)], stdout=subprocess.PIPE
        )
        until(lambda: b'_running{engine="0",model_name="policy"} 1' in metrics(said.url))
        served.process.terminate()
        answer, _ = call.communicate(timeout=10)
        assert json.loads(answer)["choices"][0]["token_ids"]  # drained, not cut off
        assert served.process.wait(10) == 0
        assert await registered(redis_service) == {}
        assert not sleepers(served.engine)
        assert "Finished server process" in served.said()


CALL = """
import sys, urllib.request
r = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(r, timeout=20).read().decode())
"""


def metrics(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        return bytes(reply.read())


async def test_a_kill_takes_vllm_along_and_the_lease_runs_out(
    redis_service: RedisService, tmp_path: Path, model: Path
) -> None:
    with serving(redis_service, tmp_path, model, "--version", "4") as served:
        assert served.ready().version == 4
        server = served.server()
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait()
        until(lambda: not sleepers(served.engine) and not server.is_running())
        for left in (await registered(redis_service)).values():  # none where the kill took longer than the lease
            assert left.ends - time.time() <= 2.0
        while await registered(redis_service):
            pass


async def test_vllm_that_dies_is_struck_off_and_its_log_is_shown(
    redis_service: RedisService, tmp_path: Path, model: Path
) -> None:
    with serving(redis_service, tmp_path, model) as served:
        served.ready()
        os.kill(served.server().pid, signal.SIGKILL)
        assert served.process.wait(10) == 1
        assert await registered(redis_service) == {}
        until(lambda: not sleepers(served.engine))  # its engine process is left to nobody
        assert "Error: vLLM ended with exit code -9. Its log ended with:\nApplication startup" in served.said()


@pytest.mark.slow
async def test_vllm_that_hangs_while_health_says_200_is_struck_off(
    redis_service: RedisService, tmp_path: Path, model: Path
) -> None:
    with serving(redis_service, tmp_path, model) as served:
        url = served.ready().url
        post(f"{url}/scripted/faults", {"spec": "hang"})
        assert served.process.wait(20) == 1
        assert await registered(redis_service) == {}
        assert "Error: vLLM hangs: " in served.said() and "no reply within 0.5 s" in served.said()


@pytest.mark.slow
async def test_vllm_that_does_not_start_is_an_error_with_its_log(redis_service: RedisService, tmp_path: Path) -> None:
    with serving(redis_service, tmp_path, tmp_path) as served:
        assert served.process.wait(20) == 1
        assert await registered(redis_service) == {}
        assert "Error: vLLM ended with exit code 3. Its log ended with:\nOSError:" in served.said()


@pytest.mark.ci
async def test_in_a_slurm_job_it_is_signed_off_before_slurm_kills(
    redis_service: RedisService, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'KillWait = 2 sec'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with serving(
        redis_service, tmp_path, model, "--", "--latency-per-token", "0.1", "--max-model-len", "300"
    ) as served:
        url = served.ready().url
        asked = {"token_ids": [5], "sampling_params": {"max_tokens": 200}}
        call = subprocess.Popen([sys.executable, "-c", CALL, f"{url}/inference/v1/generate", json.dumps(asked)])
        until(lambda: b'_running{engine="0",model_name="policy"} 1' in metrics(url))
        served.process.terminate()
        until(lambda: "still in flight after 1 s of grace" in served.said(), 4.0)
        assert served.process.wait(10) == 0
        assert await registered(redis_service) == {}
        call.wait(10)


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(redis_service: RedisService, tmp_path: Path, model: Path) -> None:
    with serving(redis_service, tmp_path, model, "--", "--latency", "60") as served:
        until(lambda: "Application startup" in served.said())  # its first token comes after a minute
        served.process.send_signal(signal.SIGINT)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(10) == 130
        assert not sleepers(served.engine)
