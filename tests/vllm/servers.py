"""Real `vllm serve` processes for tests: started, warmed, ended with the tests' own process however that ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

VENV = Path(__file__).parents[2] / ".venv-vllm"
MODELS = VENV / "models"
PYTHON = VENV / "bin" / "python"
MODEL = "m"
"""The name under which every server serves its model."""

WINDOW = 2048
"""Tokens of prompt and completion together that a server takes."""

START_SECONDS = 240.0
# Left to itself, vLLM binds the threads of every server to the same processors.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1", "TQDM_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
# A block of the cache is 128 tokens on the CPU. Chunked prefill is off: with it a request with a seed kills the engine.
FLAGS: dict[str, str] = {
    "--served-model-name": MODEL, "--host": "127.0.0.1", "--max-model-len": str(WINDOW), "--max-num-seqs": "64",
    "--num-gpu-blocks-override": "256", "--max-num-batched-tokens": "4096", "--scheduling-policy": "priority",
    "--logprobs-mode": "processed_logprobs", "--enforce-eager": "", "--no-enable-chunked-prefill": "",
    "--enable-scale-out": "", "--enable-prompt-tokens-details": "",
}  # fmt: skip

# The server ends when standard input closes: with `stop`, or with this process. Nothing of its group outlives it; a
# second is left for the helper that takes its shared memory away.
_TIED = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
{ read -r _ <&3; kill -s TERM "$server"; sleep 15; kill -s KILL 0; } 2>/dev/null &
wait "$server"
sleep 1
kill -s KILL 0
"""


def require() -> None:
    """Without the venv the test is skipped, or fails where CI=true."""
    if (MODELS / ".made").is_file():
        return
    sentence = f"{VENV.name} is not there, or not whole: say `make test-vllm`, which makes it"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)


@dataclass
class Served:
    """A server that answers. `model`: the folder that it started with; `log`: all that it printed."""

    url: str
    model: Path
    log: Path
    process: subprocess.Popen[bytes]

    def call(self, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        """GET, or POST with a body. The reply's JSON; None where it is empty. Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels; `name` without `vllm:`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def engine(self) -> psutil.Process:
        """The engine's process, which the HTTP process feeds."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in family if "EngineCore" in " ".join(process.cmdline()))

    def healthy(self) -> bool:
        """What it says of itself."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End the server; safe twice."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(30)

    def kill(self) -> None:
        """End the server and all of its processes at once, as a node that fails."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def launch(name: str, folder: Path, *, port: int = 0, **changes: str | None) -> Served:
    """Start a server of the model `name`, without waiting for it; `folder` takes its log.

    `changes`: `max_model_len="512"` sets a flag, None leaves it out.
    """
    require()
    port = port or _free_port()
    flags = words({"port": str(port), **changes})
    command = ["sh", "-c", _TIED, "vllm", str(VENV / "bin" / "vllm"), "serve", str(MODELS / name), *flags]
    log = folder / f"vllm-{name}-{port}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment(),
            start_new_session=True,
        )
    return Served(f"http://127.0.0.1:{port}", MODELS / name, log, process)


def words(changes: Mapping[str, str | None]) -> list[str]:
    """FLAGS with changes as in `launch`, as words of a command line."""
    flags = {**FLAGS, **{f"--{key.replace('_', '-')}": value for key, value in changes.items()}}
    return [word for flag, value in flags.items() if value is not None for word in (flag, value) if word]


def ready(server: Served) -> Served:
    """Wait until it answers, and send the first request, which takes seconds once. Raises AssertionError: its log."""
    until = time.monotonic() + START_SECONDS
    while not server.healthy():
        if server.process.poll() is not None or time.monotonic() > until:
            server.kill() if server.process.poll() is None else None
            raise AssertionError(f"vLLM did not start: {server.log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)
    server.call("/v1/completions", {"model": MODEL, "prompt": [10], "max_tokens": 1}, timeout=60)
    return server


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment() -> dict[str, str]:
    """For processes of `.venv-vllm`: ours without what belongs to the tests' own Python, and no network."""
    left_out = ("PYTHON", "VIRTUAL_ENV", "ROLLOUT_", "VLLM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | _ENVIRONMENT
