"""Whether an address means whoever reads it: then another machine that is told it calls itself."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def means_its_reader(host: str) -> bool:
    """Whether everybody means their own machine by this host: 127.0.0.1, ::1, 0.0.0.0, localhost."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def elsewhere(redis_url: str) -> str:
    """The host of a Redis that other machines may reach; "" on a loopback address or a Unix socket, or without one."""
    host = urlsplit(redis_url).hostname or ""
    return "" if means_its_reader(host) else host


def unreachable(url: str, redis_url: str) -> str:
    """What is wrong with a policy server's URL in the line of this Redis, as a sentence; "" where nothing is.

    It is a loopback address, and Redis's is none, so workers of other machines may come, who can't use it.
    """
    host, redis = urlsplit(url).hostname or "", elsewhere(redis_url)
    if not redis or not means_its_reader(host):
        return ""
    return (
        f"{url} reaches this machine from here alone: by {host} RUN workers on other machines call themselves, and "
        f"Redis, at {redis}, may have such workers; give an address that they reach"
    )
