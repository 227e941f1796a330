"""By which address other machines reach this one."""

from __future__ import annotations

import logging
import socket
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.errors import ConfigError

log = logging.getLogger(__name__)


def reachable_address(config: Config) -> str:
    """Where other machines reach this one: sandbox.listen, else the address that reaches Redis; "" for nowhere.

    Raises ConfigError for an address that means another machine wherever it is read.
    """
    if config.sandbox.listen in ("0.0.0.0", "::", "[::]", "*"):
        raise ConfigError(
            f"sandbox.listen = {config.sandbox.listen}: other machines are told this address, so it must be one by "
            "which they reach this machine; leave it empty for the one that reaches Redis"
        )
    if config.sandbox.listen:
        return config.sandbox.listen
    parts = urlsplit(config.redis.url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        return ""
    try:
        family, _, _, _, where = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing; the kernel chooses the interface
            return str(probe.getsockname()[0])
    except OSError as error:
        log.warning(
            "no address of this machine reaches Redis (%s): other machines can't reach what this process serves", error
        )
        return ""
