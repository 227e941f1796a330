"""The child server: a small process that imports once and forks for each call, so that a call can be killed whole.

Started by `workers.children` as `python -m workers.child_server CONTROL_FD PRELOAD...`. Each call is a fork in a
session of its own; when it ends, or is to be killed, its whole process group is killed before it is reaped, so no
signal can reach a stranger with a reused pid. The server ends with its worker, however that dies.

Control messages (SOCK_SEQPACKET): to us b"S" with two file descriptors (socket of the call, its log), b"K" + pid, or
b"P" + modules to import, separated by blanks; from us pid and exit status (struct "ii") when a call has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import importlib
import os
import select
import signal
import socket
import struct
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent ends, SIGKILL included (Linux); 0 takes that back."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if number and os.getppid() != parent:
        os._exit(1)


def _adopt() -> None:
    """Have the kernel give us what our descendants leave behind: it can't escape by a session of its own.

    Each call does so as well. While it lives, what it started stays below it; then it comes to the server.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    pids: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            pids.update(map(int, file.read().split()))
    return pids


def _in_our_session(pids: set[int]) -> set[int]:
    """Those of the children that this process started itself: each call, and all that comes of it, has another one."""
    return {pid for pid in pids if os.getsid(pid) == os.getsid(0)}


def _end_leftovers(spared: set[int]) -> None:
    """Kill what ended calls have left. They are our children, not reaped yet: no stranger can have such a pid."""
    for pid in _children() - spared:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)  # one that takes its time is reaped with the SIGCHLD of its end


def _note_signals(told: list[int]) -> None:
    """A job's SIGTERM to all its processes is the worker's to answer; what the call starts may be ended as usual."""
    both = (signal.SIGINT, signal.SIGTERM)
    for number in both:  # unlike SIG_IGN, a program that is started does not inherit this
        signal.signal(number, lambda number, _: told.append(number))
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in both])


def _call(connection: int, log: int) -> None:
    """In the fork: report our pid, serve one request, end."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        _adopt()
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        told: list[int] = []
        _note_signals(told)
        from workers.child_call import serve

        with socket.socket(fileno=connection) as sock:
            sock.sendall(struct.pack("i", os.getpid()))
            serve(sock, told)
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


def _reap(control: socket.socket, living: set[int], ours: set[int]) -> None:
    for pid in list(living):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _end_group(pid)
        _, status = os.waitpid(pid, 0)
        living.discard(pid)
        with contextlib.suppress(OSError):  # the worker is gone: the loop sees it next
            control.send(struct.pack("ii", pid, status))
    _end_leftovers(living | ours)


def _import(modules: list[str]) -> None:
    """Import once what each fork would import anew. One that does not import is told by the call that needs it."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            sys.stderr.write(f"the child server can't import {module}: {type(error).__name__}: {error}\n")
    gc.freeze()  # a collection in a fork would copy all that it shares with us


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
    _import(sys.argv[2:])
    # From here on the end of the worker is the end of `control`; killed ourselves, we could not kill the calls' groups.
    die_with_parent(0)
    _adopt()
    living: set[int] = set()
    ours = _in_our_session(_children())  # what the modules started while they were imported
    while True:
        readable, _, _ = select.select([control, woken], [], [])
        if woken in readable:
            woken.recv(4096)
        _reap(control, living, ours)
        if control not in readable:
            continue
        try:
            message, fds, _, _ = socket.recv_fds(control, 4096, 2)
        except ConnectionError:
            message, fds = b"", []
        if not message:
            for pid in living:
                _end_group(pid)
            while _children() - ours:
                _end_leftovers(ours)
                select.select([], [], [], 0.001)
            return
        if message[:1] == b"P":
            _import(message[1:].decode().split())
            ours |= _in_our_session(_children() - living)  # a call that begins is in our session for a moment
            continue
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
