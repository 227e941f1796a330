"""`rollout doctor`: looks at everything that the line needs on this machine, and says how to mend what is missing."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import handlers
from pipeline import inspect, server, server_files
from pipeline.address_file import file_of, read
from pipeline.config import Config
from pipeline.connection import check, connect, redacted
from pipeline.envelope import OLDEST_SCHEMA, READS, SCHEMA
from pipeline.errors import LineError
from pipeline.queue import Queue
from workers.workshop import handlers_path

OLDEST_PYTHON = (3, 11)
SLOW_MS = 5.0
FEW_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `grade`: ok, warn or fail; `mend` says what to do, where it is not ok."""

    name: str
    grade: str
    text: str
    mend: str = ""


async def examine(config: Config) -> list[Finding]:
    """All findings, in the order in which things are needed."""
    found: list[Finding] = [_python(), _packages(), _files(), _settings(config)]
    checks: list[Callable[[Config], Awaitable[list[Finding]]]] = [
        _redis,
        _folder,
        _payload,
        _policy,
        _handlers,
        _sandbox,
    ]
    for look in checks:
        try:
            found.extend(await look(config))
        except LineError as error:
            found.append(Finding(look.__name__[1:], "fail", str(error), "see the sentence"))
    return found


def _python() -> Finding:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "fail", text, "use Python 3.11 or newer")
    return Finding("python", "ok", text)


def _packages() -> Finding:
    try:
        wanted = requires("rollout-line") or []
    except PackageNotFoundError:
        return Finding("packages", "warn", "rollout-line is not installed (it runs from a folder)", "pip install -e .")
    names = [re.split(r"[^A-Za-z0-9_.-]", item)[0] for item in wanted if "extra ==" not in item]
    missing = [name for name in names if not _installed(name)]
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("packages", "ok", f"rollout-line {version('rollout-line')} and its {len(names)} libraries")


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _files() -> Finding:
    """A RUN worker holds a connection for each rollout."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return Finding("open files", "warn", f"at most {soft}", f"ulimit -n {FEW_FILES}, before many slots are used")
    return Finding("open files", "ok", f"at most {soft}")


def _settings(config: Config) -> Finding:
    where = str(config.source) if config.source else "the built-in defaults (no ./config.yaml here)"
    return Finding("settings", "ok", f"{where}; line {config.line.name!r}")


async def _redis(config: Config) -> list[Finding]:
    path = file_of(config)
    if path is not None and not path.exists():
        return [Finding("redis", "warn", f"none has published its address in {path} yet", "rollout slurm up")]
    if path is not None:
        read(path)  # RedisUnavailable: the line is down, it is no address, or can't be read
    config = server.located(config)
    if not config.redis.url:
        text = f"none is set and none runs; {server_files.find_binary()} could be started"
        return [Finding("redis", "warn", text, "rollout redis start (the demo brings its own)")]
    client = connect(config)
    try:
        facts = await check(client, config.redis.url)
        place = redacted(config.redis.url)
        found = [Finding("redis", "ok", f"{facts.kind} {facts.version} at {place}")]
        found += [
            Finding("redis", "warn", text.rpartition("; ")[0], text.rpartition("; ")[2]) for text in facts.warnings
        ]
        if facts.maxmemory:
            found.append(_memory(config, facts.used_memory, facts.maxmemory))
        found.append(await _latency(client))
        return found + await _line(Queue(client, config))
    finally:
        await client.aclose()


def _memory(config: Config, used: int, most: int) -> Finding:
    share = used / most
    text = f"{100 * share:.1f} % of maxmemory used, the mark is {100 * config.memory.high:g} %"
    if share > config.memory.high:
        return Finding("memory", "warn", f"{text}: enqueue is refused", "pop what is done, or raise maxmemory")
    return Finding("memory", "ok", text)


async def _latency(client: Any) -> Finding:
    spent = []
    for _ in range(20):
        began = time.perf_counter()
        await client.ping()
        spent.append((time.perf_counter() - began) * 1000)
    middle = sorted(spent)[len(spent) // 2]
    text = f"{middle:.2f} ms a round trip"
    if middle > SLOW_MS:
        return Finding("latency", "warn", text, "put Redis nearer to the workers, or look at what else it does")
    return Finding("latency", "ok", text)


async def _line(queue: Queue) -> list[Finding]:
    schema = int(await queue.execute("GET", queue.key("schema")) or SCHEMA)
    if not OLDEST_SCHEMA <= schema <= SCHEMA:
        mend = "upgrade this installation" if schema > SCHEMA else "finish its work with an older version"
        return [Finding("line", "fail", f"it has schema {schema}, this version reads {READS}", mend)]
    found = []
    if schema < SCHEMA:
        text = f"it has schema {schema}, this version would write {SCHEMA}: no payload lies in a file"
        found.append(Finding("line", "warn", text, "upgrade all workers and trainers, then: rollout schema raise"))
    alive = await inspect.workers(queue)
    depths = await inspect.depth(queue)
    for stage in ("init", "run", "eval"):
        waiting = sum(depths[stage]["ready"].values())
        serving = sum(item["stage"] == stage for item in alive)
        if waiting and not serving:
            found.append(
                Finding(
                    "line",
                    "warn",
                    f"{waiting} rollouts wait in {stage} and no worker serves it",
                    f"rollout work {stage}",
                )
            )
    return found or [
        Finding(
            "line",
            "ok",
            f"{len(alive)} live workers, {sum(sum(item['ready'].values()) for item in depths.values())} rollouts wait",
        )
    ]


async def _folder(config: Config) -> list[Finding]:
    from workers.doctor.folder import findings

    return await findings(config)


async def _payload(config: Config) -> list[Finding]:
    from workers.doctor.payload import findings

    return await findings(config)


async def _policy(config: Config) -> list[Finding]:
    from workers.doctor.policy import findings

    return await findings(config)


async def _handlers(config: Config) -> list[Finding]:
    found = []
    for name in [*handlers.BUILT_IN, *config.handlers.load]:
        try:
            handlers.load(name, handlers_path(config))
        except LineError as error:
            found.append(Finding("handlers", "fail", str(error), "correct handlers.load or the handler's module"))
    named = ", ".join([*handlers.BUILT_IN, *config.handlers.load])
    return found or [Finding("handlers", "ok", f"{named} (looked for in {handlers_path(config)})")]


async def _sandbox(config: Config) -> list[Finding]:
    from workers.doctor.sandbox import findings

    return await findings(config)
