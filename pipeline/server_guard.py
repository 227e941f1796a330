"""The process between a published Redis server and its keeper: it ends the server when the keeper's lock is lost.

Run as a script, with nothing but the standard library. Standard input is the lifeline: with each renewal of its lock
the keeper writes the time from which it counts (a double, on the monotonic clock, which is one for all processes of a
machine). `limit` seconds after the last of them the keeper hangs, is frozen, or can't renew, so another server may take
over: SIGKILL at once, without a word to the folder. End of file: the keeper has ended, be it by SIGKILL: SIGTERM, so
that the append-only file is written; SIGKILL where that takes too long. A process of its own, because a frozen keeper
can do nothing.

Arguments: limit (s), path of the log, path of the pid file, a folder to remove at the end, the server's command.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time

LOOK = 0.2
PATIENCE = 10.0
"""Seconds from SIGTERM to SIGKILL."""


def main(arguments: list[str]) -> None:
    limit, log, pid_file, folder, *command = arguments
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # a scheduler may signal all processes of a job
        signal.signal(number, signal.SIG_IGN)
    with open(log, "ab") as out:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, restore_signals=True)
    with open(pid_file, "w", encoding="ascii") as file:
        file.write(f"{server.pid}\n")
    try:
        _end(server, _lifeline_holds(server, float(limit)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lifeline_holds(server: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait until the server has ended, or is to be ended: True in good order, False at once."""
    renewed = time.monotonic()
    while server.poll() is None:
        if select.select([0], [], [], min(LOOK, limit / 5))[0]:
            told = os.read(0, 4096)
            if not told:
                return True
            renewed = struct.unpack("d", told[-8:])[0]
        if time.monotonic() - renewed >= limit:
            return False
    return True


def _end(server: subprocess.Popen[bytes], in_order: bool) -> None:
    if in_order and server.poll() is None:
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(PATIENCE)
    if server.poll() is None:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
