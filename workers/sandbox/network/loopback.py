"""One loopback address for each sandbox where a site forbids network namespaces: no two then want the same port.

The lock of an address is a name among the kernel's abstract Unix sockets. These are as wide as the network namespace,
just like the addresses themselves: processes and users of one node share them, nodes and namespaces do not. To take a
name is one step, and the kernel frees it with the process that held it: there is no table to repair or to sweep.
"""

from __future__ import annotations

import errno
import secrets
import socket

from pipeline.errors import SandboxError

NAME = "\0rollout-loopback-"
"""The leading zero byte makes it an abstract name: nothing lies on disk."""
TRIES = 1000


class Loopback:
    """A leased address, `127.x.y.z`: this process's alone until `release` or its end.

    It keeps apart who asks for addresses here; it does not stop a process from binding another one.
    """

    def __init__(self, address: str, lock: socket.socket) -> None:
        self.address = address
        self._lock = lock

    def release(self) -> None:
        """Give the address back. Safe twice."""
        self._lock.close()


def lease() -> Loopback:
    """A free address out of 127.1.0.1 to 127.254.255.254, drawn at random. Raises SandboxError.

    127.0.x.y is left out (the machine's own 127.0.0.1, a resolver's 127.0.0.53), and so are .0 and .255 at the end.
    """
    for _ in range(TRIES):
        address = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
        lock = _take(address)
        if lock is not None:
            return Loopback(address, lock)
    raise SandboxError(f"no free loopback address in {TRIES} draws out of 127.0.0.0/8: too many are in use here")


def _take(address: str) -> socket.socket | None:
    """The socket that holds this address's name; None if another process has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        lock.bind(NAME + address)
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise SandboxError(f"the loopback address {address} can't be locked: {error.strerror}") from error
    return lock
