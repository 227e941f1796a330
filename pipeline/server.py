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
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from redis.exceptions import RedisError

from pipeline import address_file, server_files as files, server_process as process
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
        self._cutting = threading.Lock()  # the number of a closed pipe may be another file's at once

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        """Whether the server's process runs, and what looks after it where it is tied."""
        return self.state.alive() and (self._watcher is None or self._watcher.poll() is None)

    def renewed(self, moment: float) -> None:
        """For one that `start_guarded` made: its lock was renewed, as of this monotonic time."""
        with self._cutting:
            if self._lifeline is not None:
                process.tell_guard(self._lifeline, moment)

    def kill(self) -> None:
        """End the server by SIGKILL, and wait for its end: nothing more is written."""
        if self.state.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def configured(self, config: Config) -> Config:
        """The configuration with this server in it."""
        return _configured(config, self.state)

    def stop(self) -> None:
        """End the server and wait for its end; what is thrown away is removed. Safe twice."""
        with self._cutting:
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
        process.end(self.state)


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


def start_guarded(
    data: Path,
    log: Path,
    *,
    tcp: tuple[str, int],
    fraction: float,
    limit: float,
    given_up: Callable[[], bool] = lambda: False,
) -> Server:
    """Start a server on the data of a folder that other machines see, for whoever holds the lock of that folder.

    It ends with this process, and `limit` seconds after the last call of `renewed`. Its small files (a password made
    for it, its socket) lie in a folder of this machine's own that ends with it. Raises as `start`.
    """
    files.sweep_runtime()
    home = files.runtime_folder(stays=True)
    files.mark_runtime(home)
    try:
        return _start_in(
            home, throw=home, tied=True, tcp=tcp, fraction=fraction, data=data, log=log, limit=limit, given_up=given_up
        )
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def find(config: Config) -> State | None:
    """The living server on `redis.data` (default: the state folder), such as `rollout redis start` leaves one."""
    return files.read_state(_folder(config))


def located(config: Config) -> Config:
    """The configuration with a Redis in it, where there is one: the present address of one that may move, else the
    private server that `find` knows, unless redis.url names another.

    One that moves stays followed: redis.address_file is set then, also where no address is published yet (redis.url
    is empty then); redis.url is for messages, and for the question which of this machine's addresses reaches it.
    """
    path = address_file.file_of(config)
    if path is not None:
        with contextlib.suppress(RedisUnavailable):
            return _following(config, path, address_file.read(path).url)
        return _following(config, path, "")
    known = None if config.redis.url else find(config)
    return config if known is None else _configured(config, known)


def _following(config: Config, path: Path, url: str) -> Config:
    return config.changed({"redis.url": url, "redis.address_file": str(path), "redis.password_file": ""})


def status(folder: Path | None = None) -> State | None:
    """The living server of a folder, or None."""
    return files.read_state(folder or files.state_folder())


def stop(folder: Path | None = None) -> State | None:
    """End the server of a folder; its data stays. Returns what was ended, None when none ran."""
    state = status(folder)
    if state is not None:
        process.end(state)
    return state


@contextlib.contextmanager
def provided(config: Config) -> Iterator[Config]:
    """The configuration with a Redis in it, for the length of the block.

    In this order: the user's URL, or the address of one that may move (RedisUnavailable where it has published none);
    a server that `find` knows; one that is started here and ends with the block (its
    data kept where `redis.data` names a folder).
    """
    config = located(config)
    if config.redis.address_file and not config.redis.url:
        address_file.read(Path(config.redis.address_file))  # raises what is missing
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
    with contextlib.suppress(RedisError, OSError), process.client(state, 2.0) as client:
        client.ping()
        raise ConfigError(f"a server on another machine ({state.url}) uses {home}: stop it there first")


def _configured(config: Config, state: State) -> Config:
    return config.changed({
        "redis.url": state.url, "redis.password_file": state.password_file, "redis.address_file": "",
    })  # fmt: skip


def _start_in(
    home: Path,
    *,
    throw: Path | None,
    tied: bool,
    tcp: tuple[str, int] | None,
    fraction: float,
    data: Path | None = None,
    log: Path | None = None,
    limit: float = 0.0,
    given_up: Callable[[], bool] = lambda: False,
) -> Server:
    """Write the files, start the process, wait for its answer. `throw` is removed at its end.

    `data`, `log`: elsewhere than in `home`; `limit`: below a guard, which `start_guarded` explains.
    """
    binary = files.find_binary()
    sock = files.socket_in(home)
    runtime = throw
    if sock is None:
        runtime = files.runtime_folder(stays=not tied)
        sock = runtime / "redis.sock"
    if tcp is not None and tcp[1] == 0:
        tcp = (tcp[0], files.free_port(tcp[0]))
    data = data or home / "data"
    data.mkdir(mode=0o700, exist_ok=True)
    password = files.ensure_password(home / "password")
    maxmemory = int(files.machine_memory() * fraction)
    conf = home / "redis.conf"
    files.write_private(conf, files.conf_text(sock=sock, password=password, data=data, maxmemory=maxmemory, tcp=tcp))
    if log is None:
        log = home / "log"
        files.write_private(log, "")
    pid_file = home / "pid"
    pid_file.unlink(missing_ok=True)
    watcher: subprocess.Popen[bytes] | None
    lifeline: int | None
    if limit:
        watcher, lifeline = process.launch_guarded(
            [binary, str(conf)], limit=limit, log=log, pid_file=pid_file, folder=home
        )
    else:
        arguments = [binary, str(conf), str(log), str(pid_file), str(runtime or ""), "KILL" if throw else "TERM"]
        watcher, lifeline = process.launch(arguments, tied=tied)
    try:
        pid, started = process.wait_until_answering(sock, password, pid_file, log, binary, given_up)
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
