"""How others run a command in a sandbox: what `sandbox.py` is compared with. Each function gives ms, one per command.

    PEERS_PYTHON benchmarks/sandbox_peers.py swerex|hpc IMAGE.sif FOLDER COUNT     (started by sandbox.py)

swe-rex and hpc-sandbox live in a virtual environment of their own, whose Python runs this file: standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ISOLATED = ["--containall", "--cleanenv", "--no-init", "--net", "--network", "none"]
COMMAND = "echo hi"


def timed(count: int, work: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def _said_hi(argv: list[str]) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stdout == b"hi\n", done


def fresh_bash(count: int) -> list[float]:
    """`bash -c` on the machine itself: no sandbox, no state kept."""
    return timed(count, lambda: _said_hi(["/bin/bash", "-c", COMMAND]))


def exec_per_command(image: Path, count: int) -> list[float]:
    """`apptainer exec` for each command: no state kept."""
    return timed(
        count, lambda: _said_hi(["apptainer", "-q", "exec", *ISOLATED, str(image), "/bin/bash", "-c", COMMAND])
    )


def kept_exec(image: Path, folder: Path, count: int) -> list[float]:
    """From nothing until a shell in one kept `apptainer exec` with a writable overlay says that it is ready."""

    def start() -> None:
        over = folder / f"over-{time.monotonic_ns()}"
        over.mkdir()
        writable = ["--fakeroot", "--overlay", str(over)]
        argv = ["apptainer", "-q", "exec", *ISOLATED, *writable, str(image), "/bin/bash", "-c", "echo ready; read -r _"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            ready.append(time.perf_counter())

    ready: list[float] = []
    times = []
    for _ in range(count):
        began = time.perf_counter()
        start()
        times.append((ready[-1] - began) * 1e3)
    return times


@contextlib.contextmanager
def tmux(socket: Path) -> Iterator[list[str]]:
    """A tmux server of our own with one pane."""
    command = ["tmux", "-S", str(socket), "-f", "/dev/null"]
    subprocess.run([*command, "new-session", "-d", "-x", "200", "-y", "50", "-s", "s", "bash --norc"], check=True)
    try:
        yield command
    finally:
        subprocess.run([*command, "kill-server"], check=True)


def tmux_polling(folder: Path, count: int, interval: float) -> list[float]:
    """Keys sent to a tmux pane, its screen read every `interval` s until the command's end mark is there."""
    with tmux(folder / f"tmux-{interval}") as command:
        number = 0

        def one() -> None:
            nonlocal number
            number += 1
            subprocess.run(
                [*command, "send-keys", "-t", "s", f"{COMMAND}; echo end-$(({number}))-$?", "Enter"], check=True
            )
            while True:
                time.sleep(interval)
                screen = subprocess.run([*command, "capture-pane", "-p", "-t", "s"], capture_output=True, check=True)
                if f"\nend-{number}-0\n".encode() in screen.stdout:
                    return

        return timed(count, one)


async def swerex(image: Path, folder: Path, count: int) -> dict[str, Any]:
    """PyPI's swe-rex: its server with a pexpect shell inside `apptainer exec`, its client over HTTP."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.remote import RemoteRuntime

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    venv = Path(sys.prefix)
    argv = ["apptainer", "-q", "exec", "--containall", "--bind", f"{venv}:{venv}:ro", str(image)]
    argv += [str(venv / "bin/python"), "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port)]
    began = time.perf_counter()
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([*argv, "--auth-token", "bench"], stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        runtime = RemoteRuntime(auth_token="bench", host="http://127.0.0.1", port=port, timeout=10.0)
        await runtime.wait_until_alive(timeout=30.0)
        await runtime.create_session(CreateBashSessionRequest())
        ready = (time.perf_counter() - began) * 1e3
        times = []
        for _ in range(count):
            start = time.perf_counter()
            seen = await runtime.run_in_session(BashAction(command=COMMAND))
            times.append((time.perf_counter() - start) * 1e3)
            assert seen.output.strip() == "hi", seen
        return {"ms": times, "ready_ms": ready}
    finally:
        server.terminate()
        server.wait()


async def hpc(image: Path, folder: Path, count: int) -> dict[str, Any]:
    """PyPI's hpc-sandbox with its overlay layout: an instance, and one `exec` for each command."""
    from hpc_sandbox import SandboxSpec, SingularityProvider

    provider = SingularityProvider(
        binary="apptainer", scratch_root=folder / "scratch", image_cache=folder / "cache", rootfs_layout="fuse-overlay",
        bind_resolv_conf=False,
    )  # fmt: skip
    ready, times, stop = [], [], []
    for _ in range(5):
        began = time.perf_counter()
        sandbox = await provider.start(SandboxSpec(image=str(image), workdir="/tmp"))
        ready.append((time.perf_counter() - began) * 1e3)
        for _ in range(count // 5):
            start = time.perf_counter()
            result = await sandbox.exec(COMMAND)
            times.append((time.perf_counter() - start) * 1e3)
            assert result.stdout == "hi\n", result
        began = time.perf_counter()
        await sandbox.stop()
        stop.append((time.perf_counter() - began) * 1e3)
    await provider.wait_for_deletions()
    # The first start also unpacks the image into the cache.
    return {"ms": times, "ready_ms": statistics.median(ready[1:]), "stop_ms": statistics.median(stop)}


def in_venv(python: str, peer: str, image: Path, folder: Path, count: int) -> dict[str, Any]:
    """Run `swerex` or `hpc` with the peers' Python. What it can't do comes back as {"reason": sentence}."""
    mend = "python3 -m venv PEERS && PEERS/bin/pip install swe-rex aiohttp hpc-sandbox, then --peers PEERS/bin/python"
    if not python:
        return {"reason": f"not measured: {mend}"}
    argv = [python, __file__, peer, str(image), str(folder), str(count)]
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "USER") if name in os.environ}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"reason": f"{peer} failed: {last}" + (f" ({mend})" if "No module" in last else "")}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    peer = {"swerex": swerex, "hpc": hpc}[sys.argv[1]]
    print(json.dumps(asyncio.run(peer(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))))
