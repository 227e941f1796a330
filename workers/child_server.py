"""The child server: a small process that imports once and forks for each call, so that a call can be killed whole.

Started by `workers.children` as `python -m workers.child_server CONTROL_FD PRELOAD...`. Each call is a fork in a
session of its own; when it ends, or is to be killed, its whole process group is killed before it is reaped, so no
signal can reach a stranger with a reused pid. The server ends with its worker, however that dies.

Control messages (SOCK_SEQPACKET): to us b"S" with two file descriptors (socket of the call, its log) or b"K" + pid;
from us pid and exit status (struct "ii") when a call has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, SIGKILL included (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _call(connection: int, log: int) -> None:
    """In the fork: report our pid, serve one request, end."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        from workers.child_call import serve

        with socket.socket(fileno=connection) as sock:
            sock.sendall(struct.pack("i", os.getpid()))
            serve(sock)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reap(control: socket.socket, living: set[int]) -> None:
    for pid in list(living):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _end_group(pid)
        _, status = os.waitpid(pid, 0)
        living.discard(pid)
        control.send(struct.pack("ii", pid, status))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    importlib.import_module("workers.child_call")
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy all that it shares with us
    living: set[int] = set()
    while True:
        readable, _, _ = select.select([control, woken], [], [])
        if woken in readable:
            woken.recv(4096)
        _reap(control, living)
        if control not in readable:
            continue
        message, fds, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            for pid in living:
                _end_group(pid)
            return
        if message[:1] == b"K":
            pid = int(message[1:])
            if pid in living:
                _end_group(pid)
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _call(*fds)
        living.add(pid)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
