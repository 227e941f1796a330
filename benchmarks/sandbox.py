"""What a sandbox costs: until it is ready, a command, a cell, its end, its memory; and what a turn gains by it.

    python benchmarks/sandbox.py [--json FILE] [--quick] [--only PART]... [--peers PYTHON] [--model-ms 1000]

Meant for a plain user. One process owns the sandboxes (`sandbox_served.py`), this one calls them as a RUN worker does.
The peers (`sandbox_peers.py`) run in the same run, on the same image.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import sandbox_image
import sandbox_peers as peers
from harness import Bench, bench, median, quantile, write

from pipeline.interfaces import Sandbox
from workers.sandbox.client import Hosts

HERE = Path(__file__).parent
COMMAND = "echo hi"
RATE, SHELLS = 150.0, 64
Figures = dict[str, Any]


class Owner:
    """The process that owns the sandboxes. `ask` sends an order and waits for its answer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, do: str, **order: Any) -> Figures:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that owns the sandboxes ended at `{do}`: its words stand above")
        answer: Figures = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def owner(line: Bench, image: str, **settings: Any) -> AsyncIterator[Owner]:
    """A sandbox host on the `apptainer` driver with this image."""
    line.change(
        sandbox__driver="apptainer", sandbox__image=image, sandbox__max_live=128, sandbox__listen="127.0.0.1",
        sandbox__root=str(line.folder / "sandboxes"), images__cache=str(line.folder / "images"), **settings,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(HERE / "sandbox_served.py"), str(line.file), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, limit=1 << 24, env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )  # fmt: skip
    try:
        yield Owner(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@contextlib.asynccontextmanager
async def opened(made: list[Figures], *, tcp: bool = False) -> AsyncIterator[list[Sandbox]]:
    """The sandboxes as a RUN worker has them: over the Unix socket, or over TCP with TLS as from another machine."""
    hosts = Hosts(lease=30.0)
    try:
        if tcp:
            hosts._here = "another machine"
        yield [await hosts.open(item["reference"], id=item["id"], token=item["token"], stage="run") for item in made]
    finally:
        await hosts.close()


async def commands(sandbox: Sandbox, count: int) -> list[float]:
    """ms of each of `count` commands, one after the other; the first ones warm the way up."""
    times = []
    for number in range(count + 5):
        began = time.perf_counter()
        output = await sandbox.bash(COMMAND)
        if number >= 5:
            times.append((time.perf_counter() - began) * 1e3)
        assert (output.text, output.exit_code) == ("hi", 0), output
    return times


async def life(line: Bench, sif: Path, quick: bool) -> Figures:
    """Ready, command over either way, memory and end of single sandboxes."""
    count = 5 if quick else 30
    async with owner(line, str(sif)) as host:
        first = await host.ask("prepare", count=1)
        more = await host.ask("prepare", count=count)
        await asyncio.sleep(1.0)
        memory = await host.ask("pss")
        async with opened(more["sandboxes"][:1]) as (near,):
            uds = await commands(near, 50 if quick else 1000)
        async with opened(more["sandboxes"][1:2], tcp=True) as (far,):
            tcp = await commands(far, 50 if quick else 1000)
        ends = await host.ask("discard")
        instances = await host.ask("instances", count=3 if quick else 15)
    return {
        "ready_first_ms": first["ms"][0],
        "ready_p50_ms": median(more["ms"]), "ready_p90_ms": quantile(more["ms"], 0.9),
        "ready_instance_p50_ms": median(instances["ms"]),
        "bash_uds_p50_ms": median(uds), "bash_uds_p99_ms": quantile(uds, 0.99),
        "bash_tcp_p50_ms": median(tcp), "bash_tcp_p99_ms": quantile(tcp, 0.99),
        "pss_per_sandbox_mb": median(memory["mb"]),
        "discard_p50_ms": median(ends["ms"]), "discard_p99_ms": quantile(ends["ms"], 0.99),
    }  # fmt: skip


async def crowd(line: Bench, sif: Path, quick: bool) -> Figures:
    """64 shells at 150 commands/s together: an open loop, each latency counted from the intended start."""
    seconds = 3.0 if quick else 20.0
    async with owner(line, str(sif)) as host:
        made = await host.ask("prepare", count=SHELLS, together=True)
        async with opened(made["sandboxes"]) as sandboxes:
            await asyncio.gather(*(sandbox.bash(COMMAND) for sandbox in sandboxes))
            times: list[float] = []
            start = time.perf_counter() + 0.1

            async def one(number: int) -> None:
                due = start + number / RATE
                await asyncio.sleep(due - time.perf_counter())
                output = await sandboxes[number % SHELLS].bash(COMMAND)
                times.append((time.perf_counter() - due) * 1e3)
                assert output.text == "hi", output

            await asyncio.gather(*(one(number) for number in range(int(RATE * seconds))))
    return {"bash64_p50_ms": median(times), "bash64_p99_ms": quantile(times, 0.99), "bash64_max_ms": max(times)}


async def hundred(line: Bench, sif: Path, quick: bool) -> Figures:
    """100 sandboxes asked for at the same moment."""
    count = 20 if quick else 100
    async with owner(line, str(sif)) as host:
        await host.ask("prepare", count=1)
        together = await host.ask("prepare", count=count, together=True)
    return {"ready100_s" if count == 100 else f"ready{count}_s": together["seconds"]}


async def cells(line: Bench, sif: Path, quick: bool) -> Figures:
    """IPython, in the image `host`: it brings this interpreter with its ipykernel."""
    async with owner(line, "host") as host:
        made = await host.ask("prepare", count=1)
        async with opened(made["sandboxes"]) as (sandbox,):
            began = time.perf_counter()
            await sandbox.ipython("1 + 1")
            first = (time.perf_counter() - began) * 1e3
            times = []
            for _ in range(20 if quick else 200):
                began = time.perf_counter()
                cell = await sandbox.ipython("1 + 1")
                times.append((time.perf_counter() - began) * 1e3)
                assert "2" in cell.text and not cell.error, cell
    return {"ipython_first_ms": first, "ipython_p50_ms": median(times), "ipython_p99_ms": quantile(times, 0.99)}


def others(image: Path, sif: Path, folder: Path, python: str, quick: bool) -> Figures:
    """The peers, and the bare ways to start."""
    few = 3 if quick else 15
    figures: Figures = {
        "bash_fresh_p50_ms": median(peers.fresh_bash(20 if quick else 200)),
        "exec_per_command_p50_ms": median(peers.exec_per_command(image, few)),
        "exec_per_command_sif_p50_ms": median(peers.exec_per_command(sif, few)),
        "kept_exec_directory_p50_ms": median(peers.kept_exec(image, folder, few)),
        "kept_exec_sif_p50_ms": median(peers.kept_exec(sif, folder, few)),
        "tmux_p50_ms": median(peers.tmux_polling(folder, few, 0.5)),
        "tmux_fast_p50_ms": median(peers.tmux_polling(folder, 10 if quick else 100, 0.01)),
    }
    for peer, name in (("swerex", "swerex"), ("hpc", "hpc_sandbox")):
        found = peers.in_venv(python, peer, sif, folder, 10 if quick else 50)
        figures[f"{name}_p50_ms"] = median(found["ms"]) if "ms" in found else None
        figures |= {f"{name}_{key}": value for key, value in found.items() if key != "ms"}
    return figures


def turn_effect(figures: Figures, model_ms: float) -> Figures:
    """Turns per minute of one rollout: `model_ms` for the model's action, and one command."""
    found: Figures = {"turn_model_ms": model_ms}
    for name in ("bash_uds", "bash_tcp", "exec_per_command", "tmux", "tmux_fast", "swerex", "hpc_sandbox"):
        command = figures.get(f"{name}_p50_ms")
        if command is not None:
            found[f"turn_{name}_per_minute"] = 60_000 / (model_ms + command)
    return found


PARTS: dict[str, Callable[[Bench, Path, bool], Awaitable[Figures]]] = {
    "life": life, "crowd": crowd, "hundred": hundred, "cells": cells,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file, one flat object")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument(
        "--only", action="append", choices=[*PARTS, "peers"], help="measure only this part (repeatable)"
    )
    parser.add_argument("--peers", default="", help="Python of a virtual environment with swe-rex and hpc-sandbox")
    parser.add_argument(
        "--model-ms", type=float, default=1000.0, help="the model's time per turn, for the effect on it"
    )
    options = parser.parse_args()
    figures: Figures = {"cores": os.cpu_count(), "user": "root" if os.getuid() == 0 else "plain"}
    with bench() as line:
        image, sif = sandbox_image.make(line.folder)
        figures["image_mb"] = sif.stat().st_size / 1e6
        for part in options.only or [*PARTS, "peers"]:
            sys.stderr.write(f"{part} ...\n")
            if part == "peers":
                figures |= others(image, sif, line.folder, options.peers, options.quick)
            else:
                figures |= asyncio.run(PARTS[part](line, sif, options.quick))
    write(figures | turn_effect(figures, options.model_ms), options.json)


if __name__ == "__main__":
    main()
