"""The process of the private Redis server: launched on a lifeline or free, waited for, given up.

A tied server hangs on a lifeline: a pipe whose write end only its starter holds, watched by a ten-line `sh`, which
ends the server and removes what is thrown away when the pipe closes. The kernel closes it at any death. Not
PR_SET_PDEATHSIG: that fires when the *thread* that started the child ends, and needs code between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from pipeline import server_guard
from pipeline.errors import RedisUnavailable
from pipeline.server_files import State, process_start

STOP_SECONDS = 20.0  # until a process that was told to end is gone
START_SECONDS = 20.0  # until the socket answers
LOAD_SECONDS = 900.0  # a large append-only file takes longer, and the server says so

# $1 the binary, $2 the conf, $3 the log, $4 the pid file, $5 a folder to remove at the end or nothing, $6 the signal
# that ends the server: TERM writes what is kept to the disk, KILL ends even a frozen one.
_TIED = """
trap '' HUP INT
"$1" "$2" </dev/null >>"$3" 2>&1 &
server=$!
echo "$server" >"$4"
trap : TERM
read -r line
{ kill -s "$6" "$server"; kill -s CONT "$server"; } 2>/dev/null
wait "$server"
if [ -n "$5" ]; then rm -rf -- "$5"; fi
"""
_UNTIED = """
trap '' HUP
"$1" "$2" </dev/null >>"$3" 2>&1 &
echo "$!" >"$4"
"""

_lifelines: set[int] = set()


def launch(arguments: list[str], *, tied: bool) -> tuple[subprocess.Popen[bytes] | None, int | None]:
    """Start the server in a session of its own, so that Ctrl-C ends its users before it."""
    command = ["/bin/sh", "-c", _TIED if tied else _UNTIED, "rollout-redis", *arguments]
    if tied:
        return _on_lifeline(command)
    subprocess.run(command, env=_environment(), start_new_session=True, stdin=subprocess.DEVNULL, check=True)
    return None, None


def launch_guarded(
    command: list[str], *, limit: float, log: Path, pid_file: Path, folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server below pipeline/server_guard.py, which wants to hear of a renewal every `limit` seconds."""
    about = [str(limit), str(log), str(pid_file), str(folder)]
    return _on_lifeline([sys.executable, "-I", "-S", server_guard.__file__, *about, *command])


def tell_guard(lifeline: int, renewed: float) -> None:
    """The lock was renewed, as of this monotonic time. A guard that is gone or does not read is left alone."""
    with contextlib.suppress(OSError):
        os.set_blocking(lifeline, False)
        os.write(lifeline, struct.pack("d", renewed))


def _environment() -> dict[str, str]:
    """A wrong locale keeps newer servers from starting; nothing else of our environment is theirs to see."""
    return {"PATH": os.pathsep.join([os.environ.get("PATH", ""), os.defpath]), "LC_ALL": "C"}


def _on_lifeline(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    reader, lifeline = os.pipe()
    try:
        watcher = subprocess.Popen(
            command,
            env=_environment(),
            start_new_session=True,
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(reader)
    _lifelines.add(lifeline)
    return watcher, lifeline


def _cut_in_child() -> None:
    """A forked child (multiprocessing) must not hold its parent's lifelines: the server would outlive the parent."""
    while _lifelines:
        with contextlib.suppress(OSError):
            os.close(_lifelines.pop())


os.register_at_fork(after_in_child=_cut_in_child)


def wait_until_answering(
    sock: Path, password: str, pid_file: Path, log: Path, binary: str, given_up: Callable[[], bool] = lambda: False
) -> tuple[int, int]:
    """Poll until the server answers PING; its pid and start time.

    Raises RedisUnavailable with the log's end; also where `given_up` says that it is not wanted any more.
    """
    client = redis.Redis(
        unix_socket_path=str(sock), password=password, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0)
    )
    began, limit = time.monotonic(), START_SECONDS
    with client:
        while time.monotonic() - began < limit:
            if given_up():
                raise RedisUnavailable(f"{binary} is not wanted any more, it was still starting")
            pid = _read_pid(pid_file)
            started = process_start(pid) if pid else None
            if pid and started is None:
                raise RedisUnavailable(f"{binary} ended while it started; it said: {_tail(log)}")
            try:
                if pid and started is not None and client.ping():
                    return pid, started
            except BusyLoadingError:
                limit = LOAD_SECONDS
            except (RedisError, OSError):
                pass  # not there yet: that is what is waited for
            time.sleep(0.005)
    raise RedisUnavailable(f"{binary} did not answer within {limit:.0f} s; it said: {_tail(log)}")


def _read_pid(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text) if text.endswith("\n") else 0


def _tail(log: Path, lines: int = 8) -> str:
    try:
        return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]) or "nothing"
    except OSError as error:
        return f"nothing ({error.strerror})"


def abandon(watcher: subprocess.Popen[bytes] | None, lifeline: int | None, pid_file: Path) -> None:
    """End what did not come up."""
    if lifeline is not None:
        cut(lifeline)
    pid = _read_pid(pid_file)
    if pid and process_start(pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if watcher is not None:
        watcher.wait(STOP_SECONDS)


def cut(lifeline: int) -> None:
    """Close a lifeline: its server ends."""
    _lifelines.discard(lifeline)
    os.close(lifeline)


def client(state: State, timeout: float) -> redis.Redis:
    """A plain client of a server whose state file was read."""
    password = Path(state.password_file).read_text(encoding="utf-8").split()[0]
    once = Retry(NoBackoff(), 0)
    limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    return redis.Redis.from_url(state.url, password=password, protocol=2, retry=once, **limits)


def end(state: State) -> None:
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
    with contextlib.suppress(RedisError, OSError), client(state, STOP_SECONDS / 2) as server:
        server.shutdown()
