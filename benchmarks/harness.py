"""What the benchmarks share: a private server, worker processes, figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline import server
from pipeline.config import Config

HERE = Path(__file__).parent


class Bench:
    """A private server in a folder of its own, and the worker processes started on it."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.config = config
        self.file = folder / "config.yaml"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._write()

    def _write(self) -> None:
        self.file.touch(mode=0o600)
        self.file.write_text(yaml.safe_dump(self.config.model_dump()))

    def change(self, **settings: Any) -> None:
        """Change settings (section__key=value) for the workers that are started from now on."""
        self.config = self.config.changed({name.replace("__", "."): value for name, value in settings.items()})
        self._write()

    def worker(self, stage: str, slots: int, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "workers.cli", "--config", str(self.file), "--log-level", "warning"]
        return self.start([*command, "work", stage, "--slots", str(slots), *more])

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """Stop these processes (all, when none is named) and wait for them."""
        chosen = list(processes) or list(self.processes)
        for process in chosen:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in chosen:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.processes.remove(process)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A fresh line for one measurement."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, server.start() as running:
        config = running.configured(Config()).changed({"handlers.path": str(HERE)})
        made = Bench(Path(folder), config)
        try:
            yield made
        finally:
            made.end()


def machine() -> dict[str, Any]:
    """What figures are worth nothing without: which code, when, and on what."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=HERE, check=False).stdout.strip()

    models = [row for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name")]
    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--short") else ""),
        "date": time.strftime("%Y-%m-%d"),
        "machine": models[0].split(":", 1)[1].strip() if models else "unknown", "cores": os.cpu_count(),
    }  # fmt: skip


def resident_mb(pid: int) -> float:
    """Resident memory of a process, in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def write(figures: dict[str, Any], file: str | None) -> None:
    """Print the figures, and write them as one flat JSON object: three decimals, two digits of what is smaller."""
    figures = {name: _short(value) if isinstance(value, float) else value for name, value in figures.items()}
    text = json.dumps(figures, indent=1)
    sys.stdout.write(text + "\n")
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text + "\n")


def _short(value: float) -> float:
    return round(value, 3) if abs(value) >= 0.001 else float(f"{value:.2g}")


def wait_until(condition: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
