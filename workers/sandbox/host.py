"""The sandbox host: one process's stock of sandboxes, its root folder, and what keeps both in step with the line.

The INIT worker's host serves its sandboxes to the other workers and keeps each only while its rollout names exactly
that one. An EVAL worker's host (no queue given) serves nobody: its sandboxes live as long as one attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from pipeline.address_file import file_of
from pipeline.config import Config
from pipeline.connection import redacted
from pipeline.errors import ConfigError, LineError, SandboxError
from pipeline.queue import Queue
from workers.address import reachable_address
from workers.canary import Canary
from workers.sandbox.boxes import layout, orphans
from workers.sandbox.client import this_machine
from workers.sandbox.server import Server
from workers.sandbox.stock import Stock, make_stock

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at whether the sandboxes are still wanted; a ring of the doorbell comes before."""

LONGEST_ROOT = layout.LONGEST_SOCKETS - len("/0123456789ab/run")
"""Bytes of a host's root: what stands below it must fit into the path of a Unix socket."""


def sandbox_root(config: Config) -> Path:
    """The folder of this line's sandboxes: two lines of one user never sweep each other's."""
    root = config.path_of(config.sandbox.root) if config.sandbox.root else None
    root = root or Path(tempfile.gettempdir()) / f"rollout-sandboxes-{os.getuid()}"
    where = file_of(config) or redacted(config.redis.url)  # a Redis that moves stays the same line's
    line = hashlib.sha256(f"{where} {config.line.name}".encode()).hexdigest()[:8]
    return root / f"{config.line.name}-{line}"


def _keep_others_out(folder: Path) -> None:
    """Who may write beside a host's folder could put another in its place, and be taken for the host.

    Raises SandboxError where somebody else made the folder.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise SandboxError(f"{folder} is not a folder of this user: somebody else made it; set sandbox.root to another")
    if about.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(about.st_mode) & ~0o022)


def _short_way(parent: Path, name: str) -> tuple[tempfile.TemporaryDirectory[str] | None, Path]:
    """The host's root: `parent / name`; where that is too long for the sockets below it, the same by a short way.

    The short way is a link in a folder of its own, which lives as long as the host. Raises SandboxError.
    """
    root = parent / name
    if len(os.fsencode(root)) <= LONGEST_ROOT:
        return None, root
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        short = tempfile.TemporaryDirectory(prefix="ro-", dir="/tmp")
        link = Path(short.name, "r")
        link.symlink_to(parent)
    except OSError as error:
        raise SandboxError(f"no folder for sandboxes can be made at {parent}: {error}; set sandbox.root") from error
    return short, link / name


class Host:
    """`stock`: the sandboxes. `rung`: set it to have a look at once."""

    def __init__(self, config: Config, stock: Stock, root: Path, owner: orphans.Owner, queue: Queue | None) -> None:
        self.stock = stock
        self.rung = asyncio.Event()
        self._config, self._root, self._owner, self._queue = config, root, owner, queue
        self._server: Server | None = None
        self._short: tempfile.TemporaryDirectory[str] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(cls, config: Config, name: str, queue: Queue | None = None, canary: Canary | None = None) -> Host:
        """Claim a root folder; with a queue, serve as the host called `name`. Raises ConfigError, SandboxError.

        `canary`: asked after each action before what came of it is told.
        """
        parent = sandbox_root(config)
        short, root = _short_way(parent, secrets.token_hex(4))
        host: Host | None = None
        owner: orphans.Owner | None = None
        try:
            owner = await asyncio.to_thread(orphans.claim_root, root)
            for folder in [parent] if config.sandbox.root else [parent.parent, parent]:
                _keep_others_out(folder)
            host = cls(config, make_stock(config, root, canary), root, owner, queue)
            host._short = short
            if queue is not None:
                host._server = Server(host.stock, queue, root / "host.sock", reachable_address(config))
                address = await host._server.start()
                host.stock.address = {"host": name, "node": this_machine(), **address}
                host._watching = asyncio.create_task(host._watch())
            host._sweeping = asyncio.create_task(host._sweep(parent))
        except BaseException:
            if host is not None:
                await host.close()
            if owner is not None:
                owner.close()
            if short is not None:
                short.cleanup()
            raise
        return host

    async def prove(self) -> None:
        """Make one plain sandbox and end it. Raises ConfigError where that fails: a host that can make none would claim
        rollout after rollout, and fail each."""
        token = secrets.token_hex(4)
        try:
            await self.stock.prepare({}, id="proof", token=token, lane="")
        except (LineError, OSError) as error:
            sandbox = self._config.sandbox
            raise ConfigError(
                f"this worker can't make sandboxes (sandbox.driver is {sandbox.driver!r}): {error}. `rollout doctor` "
                "looks at all that it needs"
            ) from error
        await self.stock.discard(f"proof-{token}")

    async def look(self) -> int:
        """Discard what no rollout names any more; returns how many. Raises RedisUnavailable, and discards nothing."""
        if self._queue is None:
            return 0
        items = list(self.stock.live.values())
        wanted = await self._queue.hosted([(item.id, item.text, item.token) for item in items])
        unwanted = [item.box.name for item, keep in zip(items, wanted, strict=True) if not keep]
        await asyncio.gather(*(self.stock.discard(name) for name in unwanted))
        return len(unwanted)

    async def _watch(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.rung.wait(), LOOK_SECONDS)
            self.rung.clear()
            try:
                await self.look()
            except LineError as error:
                log.warning("sandboxes can't be looked after now, none is discarded: %s", error)
            except Exception:  # without this loop every sandbox that is over would live for ever
                log.exception("the look at the sandboxes failed and is tried again")

    async def _sweep(self, parent: Path) -> None:
        while True:
            try:
                for gone in await asyncio.to_thread(orphans.sweep, parent):
                    log.info("removed %s, which a dead host left behind", gone)
            except Exception as error:  # a sweep that ended would leave every orphan from now on
                log.warning("the sweep of %s failed and is tried again: %s", parent, error)
            self.stock.remove_again()
            await asyncio.sleep(self._config.sandbox.sweep)

    async def close(self) -> None:
        """Stop serving, remove every sandbox and the root folder. Safe twice."""
        self._closing = True
        self.rung.set()
        await self._end_tasks()
        if self._server is not None:
            await self._server.close()
        await self.stock.close()
        await asyncio.to_thread(self._leave)
        if self._short is not None:
            self._short.cleanup()

    async def _end_tasks(self) -> None:
        """Let the look that is under way end by itself: cut off, it would leave its call to Redis behind."""
        if self._watching is not None:
            await asyncio.wait({self._watching}, timeout=LOOK_SECONDS)
        tasks = [task for task in (self._watching, self._sweeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self) -> None:
        """Give the root folder up, and remove it with its parents where nothing is left in them."""
        parent = self._root.parent.resolve()  # the short way ends with this host
        if self._root.is_dir() and not orphans.boxes(self._root):  # else a sweep sees to the rest
            shutil.rmtree(self._root)
        self._owner.close()
        for folder in (parent, parent.parent):
            with contextlib.suppress(OSError):  # another host's, or the user's own
                folder.rmdir()
