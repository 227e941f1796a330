"""By which address other machines reach this one, and how an address stands in a URL."""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.loopback import means_its_reader

log = logging.getLogger(__name__)

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

FAR = ("198.51.100.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849): nothing is sent; the kernel names the default route's own address."""

ANYWHERE = ("0.0.0.0", "::", "[::]", "*")
SETTING = "network.interface"


class Own(NamedTuple):
    """One address of this machine, and the interface that has it."""

    interface: str
    ip: IP

    def __str__(self) -> str:
        return f"{self.ip} ({self.interface})"


def own_address(config: Config, towards: str = "") -> str:
    """The address that this machine publishes: network.interface, else the one by which it reaches the URL `towards`.

    Without `towards` (Redis itself, which reaches nobody): the default route's, else the host name's, else any that
    is no loopback address; a loopback address, with a warning, where there is no other. Without brackets, also for
    IPv6 (see `bracketed`). Raises ConfigError for a setting that names no address of this machine, or more than one,
    and where no route leads to `towards`.
    """
    if config.network.interface:
        return str(_chosen(config.network.interface))
    if not towards:
        return _without_a_peer()
    host = urlsplit(towards).hostname or ""
    try:
        found = _source(host)
    except OSError as error:
        raise ConfigError(
            f"no address of this machine reaches {host or towards} ({error}): is its name right? Else say by "
            f"{SETTING} which of this machine's addresses other machines use: {_named(_all())}"
        ) from None
    if _is_loopback(found) and not means_its_reader(host):
        log.debug("%s is this machine, by a loopback address that other machines can't use", host)
        return _without_a_peer()
    return found


def reachable_address(config: Config) -> str:
    """Where other machines reach what this process serves; "" for nowhere.

    sandbox.listen, else `own_address` towards Redis; nowhere with a Redis on a Unix socket, which no other machine
    reaches. Raises ConfigError for an address that means another machine wherever it is read, and as `own_address`
    does for network.interface.
    """
    if config.sandbox.listen in ANYWHERE:
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
        return own_address(config, config.redis.url)
    except ConfigError as error:
        if config.network.interface:
            raise
        log.warning("%s; until then other machines can't reach what this process serves", error)
        return ""


def bracketed(host: str) -> str:
    """The host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _chosen(wanted: str) -> IP:
    """The address that network.interface means: of an interface, in a network, or itself."""
    if wanted in ANYWHERE:
        raise ConfigError(f"{SETTING}: {wanted} is every address and none: give the one that other machines use")
    try:
        if "/" in wanted:
            return _in_network(wanted, ipaddress.ip_network(wanted, strict=False))
        address = ipaddress.ip_address(wanted.strip("[]"))
    except ValueError:
        return _of_interface(wanted)
    if not _can_bind(address):
        raise ConfigError(f"{SETTING}: {address} is no address of this machine; it has {_named(_all())}")
    return address


def _in_network(wanted: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> IP:
    found = [own for own in _all() if own.ip in network]
    if not found:
        raise ConfigError(f"{SETTING}: this machine has no address in {wanted}; it has {_named(_all())}")
    if len({own.interface for own in found}) > 1:
        raise ConfigError(
            f"{SETTING}: several interfaces have an address in {wanted}: {_named(found)}; give a smaller network, or "
            "the interface's name"
        )
    return found[0].ip


def _of_interface(wanted: str) -> IP:
    if wanted not in psutil.net_if_addrs():
        raise ConfigError(
            f"{SETTING}: this machine has no interface {wanted!r}, and it is neither a network (10.1.0.0/16) nor an "
            f"address; it has {_named(_all())}"
        )
    found = [own for own in _all() if own.interface == wanted]
    if not found:
        down = "" if psutil.net_if_stats()[wanted].isup else ", and is down"
        raise ConfigError(
            f"{SETTING}: interface {wanted} has no address that other machines could use{down}; this machine has "
            f"{_named(_all())}"
        )
    return found[0].ip


def _all() -> list[Own]:
    """This machine's addresses in a fixed order, IPv4 first; without those that mean nothing beyond their own cable."""
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for item in addresses:
            if item.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(item.address.partition("%")[0])
                if not ip.is_link_local:
                    found.append(Own(name, ip))
    return sorted(found, key=lambda own: (own.ip.version, own.interface, own.ip))


def _named(found: list[Own]) -> str:
    return ", ".join(map(str, found)) or "none at all"


def _without_a_peer() -> str:
    """The default route's address, else the host name's, else the first that is no loopback address, else 127.0.0.1."""
    for host in (*FAR, socket.gethostname()):
        try:
            found = _source(host)
        except OSError:
            continue  # no route of that family, or a host name that nobody knows: the next one
        if not _is_loopback(found) and not ipaddress.ip_address(found).is_link_local:
            return found
    others = [own for own in _all() if not own.ip.is_loopback]
    if others:
        return str(others[0].ip)
    log.warning(
        "this machine has no address but loopback ones: it publishes 127.0.0.1, by which every other machine means "
        "itself; only processes of this machine can use it (%s names another one)", SETTING
    )  # fmt: skip
    return "127.0.0.1"


def _source(host: str) -> str:
    """The address of this machine by which it sends to `host`. Raises OSError: no route, an unknown name."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing; the kernel chooses the interface
        return str(probe.getsockname()[0]).partition("%")[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _can_bind(address: IP) -> bool:
    """Whether it is this machine's, by the kernel's own word (all of 127.0.0.0/8 is)."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
