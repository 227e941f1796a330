"""One node's part in `rollout doctor --cluster`: its listener, its calls to the others, and what it finds at home."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.envelope import SCHEMA
from pipeline.errors import LineError
from pipeline.queue import Queue
from workers.address import own_address, reachable_address
from workers.doctor.meeting import FILE_SECONDS, InFolder, beside

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
SANDBOX_SECONDS = 90.0
SAME_SECONDS = 10.0
"""For a file that was written before anybody was asked about it."""
SEEN_SECONDS = 65.0
"""For a file that was replaced; NFS may remember the old one for a minute."""
SEEN = "seen"
"""The file by which the nodes find out whether they share a folder."""
TRIES = 5
NO_REDIS, NO_FOLDER = "none runs yet", "none is set"
"""What a node says that misses nothing of its own."""


@dataclass(frozen=True)
class Called:
    """`ms`: a round trip over TCP, the median of TRIES; or why there was none."""

    ms: float = 0.0
    error: str = ""


class Listener:
    """Answers the other nodes at the address that this one publishes. `nonce` proves that it is this one; `folder`: the
    one in which they meet, the only one that it looks into, since anybody may ask."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.nonce = secrets.token_hex(8)
        self.port = 0
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> None:
        """Raises OSError: it can't listen there."""
        self._server = await asyncio.start_server(self._serve, address, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`hello TEXT`: the nonce and TEXT are answered; `look SECONDS TEXT`: whether the folder's SEEN holds TEXT."""
        try:
            while words := (await reader.readline()).decode("utf-8", "replace").rstrip("\n").split(" ", 2):
                if words[0] == "hello" and len(words) == 2:
                    answer = f"{self.nonce} {words[1]}"
                elif words[0] == "look" and len(words) == 3 and self._folder is not None:
                    answer = await holds(self._folder / SEEN, words[2], min(float(words[1]), SEEN_SECONDS))
                else:
                    break
                writer.write(f"{answer}\n".encode())
                await writer.drain()
        except (OSError, ValueError) as error:
            log.debug("a caller went away: %s", error)
        finally:
            writer.close()


async def holds(path: Path, text: str, seconds: float) -> str:
    """`seen` once the file at `path` holds `text`, else why not, after so many seconds."""

    def look() -> str:
        until, why = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            try:
                if path.read_text("utf-8") == text:
                    return "seen"
                why = "an older one is seen"
            except OSError as error:
                why = str(error.strerror)
            time.sleep(0.02)
        return why

    try:
        return await beside(look, seconds + FILE_SECONDS)
    except TimeoutError:
        return "the file system does not answer"


async def call(peer: dict[str, Any]) -> Called:
    """Connect to another node's listener and measure. `peer`: its hello."""
    where = f"{peer['address']} port {peer['port']}"
    try:
        async with asyncio.timeout(CALL_SECONDS):
            reader, writer = await asyncio.open_connection(peer["address"], peer["port"])
            try:
                spent = []
                for _ in range(TRIES):
                    challenge, began = secrets.token_hex(8), time.perf_counter()
                    answer = await ask(reader, writer, f"hello {challenge}")
                    spent.append((time.perf_counter() - began) * 1e3)
                    if answer != f"{peer['nonce']} {challenge}":
                        return Called(error=f"somebody else answers at {where}")
                return Called(ms=round(statistics.median(spent), 3))
            finally:
                writer.close()
    except TimeoutError:
        return Called(error=f"no answer from {where} within {CALL_SECONDS:g} s")
    except ConnectionRefusedError:
        return Called(error=f"{where} refuses")
    except OSError as error:
        return Called(error=f"{where}: {error.strerror or error}")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> str:
    writer.write(f"{line}\n".encode())
    return (await reader.readline()).decode("utf-8", "replace").rstrip("\n")


async def same_folder(peers: dict[str, dict[str, Any]], shared: InFolder) -> dict[str, Any]:
    """For each peer (rank -> hello): s until it saw that a file in `shared` was replaced, or why it did not.

    As with the address of Redis: every node has read the file before, and a new one takes its place. Left out is who
    can't be reached.
    """
    old, new = secrets.token_hex(8), secrets.token_hex(8)
    await shared.write(SEEN, old)
    replaced = asyncio.Event()
    ready = {rank: asyncio.Event() for rank in peers}
    began = 0.0

    async def one(rank: str, peer: dict[str, Any]) -> Any:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(peer["address"], peer["port"]), CALL_SECONDS
            )
        except (OSError, TimeoutError):
            ready[rank].set()
            return None
        try:
            there = await asyncio.wait_for(ask(reader, writer, f"look {SAME_SECONDS} {old}"), SAME_SECONDS * 3)
            ready[rank].set()
            if there != "seen":
                return f"a file that another node wrote is not there ({there or 'it went away'})"
            await replaced.wait()
            said = await asyncio.wait_for(ask(reader, writer, f"look {SEEN_SECONDS} {new}"), SEEN_SECONDS * 1.5)
            spent = time.monotonic() - began
            return round(spent, 3) if said == "seen" else f"{said or 'it went away'}, {SEEN_SECONDS:g} s after"
        except (OSError, TimeoutError) as error:
            return str(error) or "it does not answer any more"
        finally:
            ready[rank].set()
            writer.close()

    asked = {rank: asyncio.create_task(one(rank, peer)) for rank, peer in peers.items()}
    for event in ready.values():
        await event.wait()
    await shared.write(SEEN, new)
    began = time.monotonic()
    replaced.set()
    found = {rank: await task for rank, task in asked.items()}
    return {rank: said for rank, said in found.items() if said is not None}


def hello(config: Config, node: str) -> dict[str, Any]:
    """What a node says of itself before anything is tried; `wrong` where it can't say by which address it is found."""
    from workers.sandbox.client import this_machine

    try:
        package = version("rollout-line")
    except PackageNotFoundError:
        package = "not installed"
    about = {
        "node": node, "machine": this_machine(), "package": package, "schema": SCHEMA,
        "python": platform.python_version(), "address": "", "port": 0, "nonce": "", "wrong": "",
    }  # fmt: skip
    try:
        about["address"] = reachable_address(config) or own_address(config)
    except LineError as error:
        about["wrong"] = str(error)
    return about


async def at_home(config: Config, queue: Queue | None) -> dict[str, Any]:
    """What this node finds out by itself: Redis and its clock, the folder, temporary files, a sandbox."""
    redis, folder, temporary, sandbox = await asyncio.gather(
        _redis(queue), _folder(config), _temporary(), _sandbox(config)
    )
    return {"redis": redis, "folder": folder, "temporary": temporary, "sandbox": sandbox}


async def _redis(queue: Queue | None) -> dict[str, Any]:
    """Round trip in ms (median), and this node's clock less the server's, in s."""
    if queue is None:
        return {"error": NO_REDIS}
    spent, ahead = [], []
    try:
        await queue.execute("PING")
        for _ in range(TRIES):
            began, clock = time.perf_counter(), time.time()
            seconds, micros = await queue.execute("TIME")
            spent.append(time.perf_counter() - began)
            ahead.append(clock + spent[-1] / 2 - (int(seconds) + int(micros) / 1e6))
    except (LineError, RedisError) as error:
        return {"error": str(error)}
    return {"ms": round(statistics.median(spent) * 1e3, 3), "clock": round(statistics.median(ahead), 3), "error": ""}


async def _folder(config: Config) -> dict[str, Any]:
    """Is slurm.folder here, and may this user write there?"""
    if not config.slurm.folder:
        return {"error": NO_FOLDER}
    folder = config.path_of(config.slurm.folder)
    return await _disk(folder, f"slurm.folder: {folder}")


async def _temporary() -> dict[str, Any]:
    folder = Path(tempfile.gettempdir())
    return await _disk(folder, f"{folder}")


async def _disk(folder: Path, name: str) -> dict[str, Any]:
    from workers.sandbox.images.files import filesystem

    def look() -> str:
        if not folder.is_dir():
            return "is not there"
        descriptor, path = tempfile.mkstemp(prefix=".rollout-doctor-", dir=folder)
        os.close(descriptor)
        os.unlink(path)
        return ""

    try:
        wrong = await beside(look, FILE_SECONDS)
        kind = await beside(lambda: filesystem(folder), FILE_SECONDS)
    except TimeoutError:
        return {"error": f"{name} does not answer within {FILE_SECONDS:g} s"}
    except OSError as error:
        return {"error": f"{name} can't be written to: {error.strerror}"}
    return {"path": str(folder), "kind": kind, "error": wrong and f"{name} {wrong}"}


async def _sandbox(config: Config) -> dict[str, Any]:
    """Make one as a worker does, and end it."""
    from workers.sandbox.host import Host

    began = time.monotonic()
    try:
        async with asyncio.timeout(SANDBOX_SECONDS):
            host = await Host.open(config, "doctor")
            try:
                await host.prove()
            finally:
                with contextlib.suppress(OSError):
                    await host.close()
    except TimeoutError:
        return {"error": f"{config.sandbox.driver} started none within {SANDBOX_SECONDS:g} s"}
    except (LineError, OSError) as error:
        return {"error": str(error)}
    return {"seconds": round(time.monotonic() - began, 3), "error": ""}
