"""The private Redis server: started where none is configured, on a Unix socket of 0600 with a random password.

Two lives. *Tied*: it ends with the process that started it, even when that is killed with SIGKILL. *Untied*: it stays
until `stop` (this is `rollout redis start`). Two kinds of data: thrown away with the server, or kept in a folder.
`pipeline/server_process.py` says how a tied server notices the death, `pipeline/server_files.py` what lies on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from pipeline import server_files as files, server_process as process
from pipeline.config import Config
from pipeline.errors import ConfigError, RedisUnavailable
from pipeline.server_files import State
from pipeline.server_process import STOP_SECONDS


class Server:
    """A server that this process started. Use it as a context, or call `stop`."""

    def __init__(self, state: State, watcher: subprocess.Popen[bytes] | None, lifeline: int | None) -> None:
        self.state = state
        self.url = state.url
        self.password_file = state.password_file
        self.pid = state.pid
        self._watcher = watcher
        self._lifeline = lifeline

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self.state.alive()

    def configured(self, config: Config) -> Config:
        """The configuration with this server in it."""
        return _configured(config, self.state)

    def stop(self) -> None:
        """End the server and wait for its end; what is thrown away is removed. Safe twice."""
        if self._lifeline is not None:
            process.cut(self._lifeline)
            self._lifeline = None
        if self._watcher is not None:
            try:
                self._watcher.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._watcher.kill()
                self._watcher.wait()
            self._watcher = None
        _end(self.state)


def start(
    folder: Path | None = None,
    *,
    keep: bool = False,
    tied: bool = True,
    tcp: tuple[str, int] | None = None,
    fraction: float = 0.25,
) -> Server:
    """Start a server and wait until it answers.

    keep      data stays in `folder` (None: `server_files.state_folder()`); False: thrown away, `folder` must be None
    tied      its life ends with this process; False: it stays until `stop`
    tcp       (host, port) to listen on as well, port 0 = a free one; the URL is then the TCP one
    fraction  share of this machine's memory that it may use

    Raises ConfigError (no binary, a folder open to others, one that has a server), RedisUnavailable (did not start).
    """
    if not keep:
        if folder is not None or not tied:
            raise ValueError("a server whose data is thrown away has no folder, and is tied to its starter")
        home = files.runtime_folder(stays=False)
        try:
            return _start_in(home, throw=home, tied=True, tcp=tcp, fraction=fraction)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
    home = files.private_folder(folder or files.state_folder())
    with open(home / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = files.read_state(home)
        if running is not None:
            raise ConfigError(f"a server already runs on {home} (pid {running.pid}): use it, or stop it first")
        _refuse_elsewhere(home)
        return _start_in(home, throw=None, tied=tied, tcp=tcp, fraction=fraction)


def find(config: Config) -> State | None:
    """The living server on `redis.data` (default: the state folder), such as `rollout redis start` leaves one."""
    return files.read_state(_folder(config))


def located(config: Config) -> Config:
    """The configuration with the private server that `find` knows, where it names no Redis and there is one."""
    known = None if config.redis.url else find(config)
    return config if known is None else _configured(config, known)


def status(folder: Path | None = None) -> State | None:
    """The living server of a folder, or None."""
    return files.read_state(folder or files.state_folder())


def stop(folder: Path | None = None) -> State | None:
    """End the server of a folder; its data stays. Returns what was ended, None when none ran."""
    state = status(folder)
    if state is not None:
        _end(state)
    return state


@contextlib.contextmanager
def provided(config: Config) -> Iterator[Config]:
    """The configuration with a Redis in it, for the length of the block.

    In this order: the user's URL; a server that `find` knows; one that is started here and ends with the block (its
    data kept where `redis.data` names a folder).
    """
    config = located(config)
    if config.redis.url:
        yield config
        return
    data = config.path_of(config.redis.data) if config.redis.data else None
    with start(data, keep=data is not None, fraction=config.redis.maxmemory_fraction) as server:
        yield server.configured(config)


def _folder(config: Config) -> Path:
    return config.path_of(config.redis.data) if config.redis.data else files.state_folder()


def _refuse_elsewhere(home: Path) -> None:
    """Two servers on one shared folder would ruin the append-only file: ask the one on the other machine."""
    state = files.stale_state(home)
    if state is None or state.boot == files.boot_id() or state.url.startswith("unix:"):
        return
    with contextlib.suppress(RedisError, OSError), _client(state, 2.0) as client:
        client.ping()
        raise ConfigError(f"a server on another machine ({state.url}) uses {home}: stop it there first")


def _client(state: State, timeout: float) -> redis.Redis:
    password = Path(state.password_file).read_text(encoding="utf-8").split()[0]
    once = Retry(NoBackoff(), 0)
    limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    return redis.Redis.from_url(state.url, password=password, protocol=2, retry=once, **limits)


def _configured(config: Config, state: State) -> Config:
    return config.changed({"redis.url": state.url, "redis.password_file": state.password_file})


def _start_in(home: Path, *, throw: Path | None, tied: bool, tcp: tuple[str, int] | None, fraction: float) -> Server:
    """Write the files, start the process, wait for its answer. `throw` is removed at its end."""
    binary = files.find_binary()
    sock = files.socket_in(home)
    runtime = throw
    if sock is None:
        runtime = files.runtime_folder(stays=not tied)
        sock = runtime / "redis.sock"
    if tcp is not None and tcp[1] == 0:
        tcp = (tcp[0], files.free_port(tcp[0]))
    data = home / "data"
    data.mkdir(mode=0o700, exist_ok=True)
    password = files.ensure_password(home / "password")
    maxmemory = int(files.machine_memory() * fraction)
    conf = home / "redis.conf"
    files.write_private(conf, files.conf_text(sock=sock, password=password, data=data, maxmemory=maxmemory, tcp=tcp))
    files.write_private(home / "log", "")
    pid_file = home / "pid"
    pid_file.unlink(missing_ok=True)
    arguments = [binary, str(conf), str(home / "log"), str(pid_file), str(runtime or ""), "KILL" if throw else "TERM"]
    watcher, lifeline = process.launch(arguments, tied=tied)
    try:
        pid, started = process.wait_until_answering(sock, password, pid_file, home / "log", binary)
    except BaseException:
        process.abandon(watcher, lifeline, pid_file)
        if runtime is not None:
            shutil.rmtree(runtime, ignore_errors=True)
        raise
    state = State(
        url=_tcp_url(tcp) if tcp else f"unix://{sock}",
        password_file=str(home / "password"),
        pid=pid,
        start_time=started,
        boot=files.boot_id(),
        folder=str(home),
        runtime=str(runtime or ""),
        tied=tied,
        binary=binary,
    )
    files.write_state(state)
    return Server(state, watcher, lifeline)


def _tcp_url(tcp: tuple[str, int]) -> str:
    host = f"[{tcp[0]}]" if ":" in tcp[0] else tcp[0]
    return f"redis://{host}:{tcp[1]}/0"


def _end(state: State) -> None:
    """SHUTDOWN, then SIGTERM, then SIGKILL, each only while it is that very process; then its small files."""
    deadline = time.monotonic() + STOP_SECONDS
    if state.alive() and not state.tied:
        _shut_down(state)
    sent: int | None = None
    while state.alive():
        late = time.monotonic() > deadline - STOP_SECONDS / 2
        wanted = signal.SIGKILL if late else signal.SIGTERM if state.tied else None
        if wanted is not None and wanted != sent:
            sent = wanted
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, wanted)
        if time.monotonic() > deadline:
            raise RedisUnavailable(f"the server (pid {state.pid}) does not end, not even by SIGKILL")
        time.sleep(0.005)
    for name in ("server.json", "url", "pid", "redis.sock"):
        (Path(state.folder) / name).unlink(missing_ok=True)
    if state.runtime:
        shutil.rmtree(state.runtime, ignore_errors=True)


def _shut_down(state: State) -> None:
    """SHUTDOWN writes the append-only file to the disk before the process ends."""
    # Refused (a first rewrite of the file runs) or frozen: signals follow.
    with contextlib.suppress(RedisError, OSError), _client(state, STOP_SECONDS / 2) as client:
        client.shutdown()
