"""Where a policy server of this machine listens, and by which URLs this process and the workers reach it."""

from __future__ import annotations

import socket
from typing import NamedTuple

from pipeline.backends import backend_id
from pipeline.config import Config
from pipeline.errors import ConfigError
from workers.address import ANYWHERE, bracketed, reachable_address


class Place(NamedTuple):
    """`listen`: the address to listen on; `near`: the URL by which this process reaches it, `far`: workers."""

    listen: str
    port: int
    near: str
    far: str


def place(config: Config, who: str, *, host: str = "", port: int = 0, advertise: str = "") -> Place:
    """Where to listen, by what the user said; `config` names a Redis, `who` listens (for the sentences).

    `host`: "" for the address by which this machine reaches Redis (loopback only where Redis has such an address or a
    Unix socket). `port`: 0 takes a free one. `advertise`: the URL by which workers reach it, "" for host and port.
    Raises ConfigError where that is not known, and where the port can't be had.
    """
    own = "" if host and host not in ANYWHERE else reachable_address(config)
    listen = host or own or "127.0.0.1"
    if listen in ANYWHERE and not (advertise or own):
        raise ConfigError(
            f"--host {listen}: which address do workers on other machines use? Give it as --advertise URL"
        )
    port = _port(who, listen, port)
    near = f"http://{bracketed('127.0.0.1' if listen in ANYWHERE else listen)}:{port}"
    far = advertise.rstrip("/") or f"http://{bracketed(own or listen)}:{port}"
    backend_id(far)  # a wrong URL is said before anything is started
    return Place(listen, port, near, far)


def _port(who: str, host: str, port: int) -> int:
    """A free port there. Raises ConfigError when the wanted one is taken, or the address is not this machine's."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"{who} can't listen on {host}, port {port or 'any'}: {error.strerror}") from None
