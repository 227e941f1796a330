"""Which hosts a sandbox may reach: the patterns of a task, the targets of requests, and the addresses behind names.

All three are brought into one form first (lower case, no trailing dot, IDNA, addresses in their shortest form), so
that no spelling of a forbidden host gets past.
"""

from __future__ import annotations

import ipaddress
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.errors import HandlerError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS = frozenset({80, 443})
"""What a pattern without a port allows."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(?::(?P<port>[0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Target(NamedTuple):
    """Host in its one form (a name or an address, an IPv6 one without brackets), and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Pattern(NamedTuple):
    """`port` None: 80 and 443. `below`: the hosts below this name, not itself."""

    host: str
    port: int | None
    below: bool

    def matches(self, target: Target) -> bool:
        if target.port not in ({self.port} if self.port else PORTS):
            return False
        return target.host.endswith("." + self.host) if self.below else target.host == self.host


class Allowed:
    """The hosts that a task allows. Raises HandlerError for a pattern that can't be read."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.texts = list(patterns)
        self._patterns = [_pattern(text) for text in patterns]

    def __str__(self) -> str:
        """What it lets through, in words."""
        found = list(zip(self.texts, self._patterns, strict=True))
        bare = textwrap.shorten(", ".join(text for text, pattern in found if pattern.port is None), 200)
        exact = textwrap.shorten(", ".join(text for text, pattern in found if pattern.port is not None), 200)
        ports = " and ".join(str(port) for port in sorted(PORTS))
        return ", ".join(filter(None, [bare and f"{bare} (ports {ports} only)", exact])) or "nothing"

    def permits(self, target: Target) -> bool:
        """Whether a pattern names this host and port."""
        return any(pattern.matches(target) for pattern in self._patterns)

    def reaches(self, address: str, port: int) -> bool:
        """Whether this address, which a permitted host has, may be connected to.

        A name may point anywhere, and its owner may change it at any time: so only public addresses of other machines
        are reached, unless a pattern names the very address.
        """
        found = _plain(ipaddress.ip_address(address))
        return _is_public(found) or self.permits(Target(str(found), port))


def target_of(authority: str, port: int | None = None) -> Target:
    """Read `host`, `host:port` or `[v6]:port`; `port` is what holds where none stands. Raises ValueError."""
    host, given = _split(authority)
    number = given or port
    if number is None:
        raise ValueError("the port is missing")
    return Target(host, number)


def _split(authority: str) -> tuple[str, int | None]:
    """Host in its one form, and the port if one stands there. Raises ValueError."""
    if "@" in authority:
        raise ValueError("user and password do not belong before the host: send them in a header")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise ValueError("this is no `host` or `host:port`")
    port = int(parts["port"]) if parts["port"] else None
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{port} is no port (1 to 65535)")
    return _host(parts["host"]), port


def _pattern(text: str) -> Pattern:
    below = text.startswith("*.")
    try:
        host, port = _split(text.removeprefix("*."))
        if below and _as_address(host) is not None:
            raise ValueError("an address has no hosts below it")
    except ValueError as error:
        raise HandlerError(
            f"the handler's `sandbox` can't be met: network.allow: {text!r}: {error} "
            "(patterns: `example.org`, `*.example.org`, `example.org:8443`, `10.0.0.5:8080`)"
        ) from None
    return Pattern(host, port, below)


def _host(text: str) -> str:
    """The one form of a name or an address. Raises ValueError."""
    if text.startswith("["):
        return str(_plain(ipaddress.IPv6Address(text[1:-1])))
    try:
        name = text.removesuffix(".").encode("idna").decode("ascii").lower()
    except UnicodeError as error:
        raise ValueError(f"the name can't be written in IDNA: {error}") from None
    address = _as_address(name)
    if address is not None:
        return str(address)
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("the name has characters or parts that no host name has")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError("the name looks like an address in an unusual form: write it as four decimal numbers")
    return name


def _as_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """The IPv4 address where an IPv6 one only wraps it (mapped, NAT64)."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    """Another machine's address in the open internet."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address.is_site_local or address.sixtofour is not None):
        return False
    return str(address) not in _own_addresses()


def _own_addresses() -> set[str]:
    """Addresses of this machine's interfaces: asked each time, for they may change."""
    import psutil

    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
