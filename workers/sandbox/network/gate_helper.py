"""Runs inside a sandbox's network namespace: binds a listener on 127.0.0.1 and hands it to the host process.

A program of its own that imports nothing of ours: `python -I -S gate_helper.py FD`, FD being a Unix socket.
"""

import socket
import sys

BACKLOG = 64


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel, socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        socket.send_fds(channel, [b"\0"], [listener.fileno()])


if __name__ == "__main__":
    main()
