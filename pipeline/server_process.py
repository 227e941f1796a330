"""The process of the private Redis server: launched on a lifeline or free, waited for, given up.

A tied server hangs on a lifeline: a pipe whose write end only its starter holds, watched by a ten-line `sh`, which
ends the server and removes what is thrown away when the pipe closes. The kernel closes it at any death. Not
PR_SET_PDEATHSIG: that fires when the *thread* that started the child ends, and needs code between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from pipeline.errors import RedisUnavailable
from pipeline.server_files import process_start

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
    # A wrong locale keeps newer servers from starting; nothing else of our environment is theirs to see.
    environment = {"PATH": os.pathsep.join([os.environ.get("PATH", ""), os.defpath]), "LC_ALL": "C"}
    command = ["/bin/sh", "-c", _TIED if tied else _UNTIED, "rollout-redis", *arguments]
    if not tied:
        subprocess.run(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, check=True)
        return None, None
    reader, lifeline = os.pipe()
    try:
        watcher = subprocess.Popen(
            command,
            env=environment,
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


def wait_until_answering(sock: Path, password: str, pid_file: Path, log: Path, binary: str) -> tuple[int, int]:
    """Poll until the server answers PING; its pid and start time. Raises RedisUnavailable with the log's end."""
    client = redis.Redis(
        unix_socket_path=str(sock), password=password, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0)
    )
    began, limit = time.monotonic(), START_SECONDS
    with client:
        while time.monotonic() - began < limit:
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
