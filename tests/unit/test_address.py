"""The address that a machine publishes: network.interface, the route to Redis, or what there is."""

from __future__ import annotations

import logging
import socket
from typing import Any, NamedTuple

import psutil
import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from workers import address
from workers.address import bracketed, own_address, reachable_address


class Item(NamedTuple):
    """One address as psutil tells it."""

    family: socket.AddressFamily
    address: str


def v4(text: str) -> Item:
    return Item(socket.AF_INET, text)


def v6(text: str) -> Item:
    return Item(socket.AF_INET6, text)


NODE = {
    "lo": [v4("127.0.0.1"), v6("::1")],
    "eth0": [v4("192.168.7.5"), v6("fe80::1%eth0")],
    "ib0": [v6("fd12::9"), v4("10.1.0.9"), v4("10.1.0.5"), Item(socket.AddressFamily(17), "00:11:22:33:44:55")],
    "usb0": [v4("169.254.3.3")],
}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with two networks, whatever this machine has."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: NODE)


def with_interface(text: str) -> Config:
    return Config().changed({"network.interface": text})


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("ib0", "10.1.0.5"),  # the lowest one, and IPv4 before IPv6, whatever the order in which they are told
        ("eth0", "192.168.7.5"),
        ("lo", "127.0.0.1"),
        ("10.1.0.0/16", "10.1.0.5"),
        ("10.1.0.9/32", "10.1.0.9"),
        ("10.1.0.77/24", "10.1.0.5"),  # somebody else's address with its mask means the network too
        ("fd12::/16", "fd12::9"),
    ],
)
def test_the_setting_names_one_address(node: None, setting: str, wanted: str) -> None:
    assert own_address(with_interface(setting)) == wanted
    assert own_address(with_interface(setting), "redis://127.0.0.1:6379") == wanted, "the setting wins over the route"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ib1", ["no interface 'ib1'", "192.168.7.5 (eth0)", "10.1.0.5 (ib0)"]),
        ("usb0", ["interface usb0 has no address that other machines could use"]),
        ("10.2.0.0/16", ["no address in 10.2.0.0/16", "10.1.0.5 (ib0)"]),
        ("0.0.0.0/0", ["several interfaces", "192.168.7.5 (eth0)", "10.1.0.5 (ib0)", "smaller network"]),
        ("198.51.100.7", ["198.51.100.7 is no address of this machine", "10.1.0.5 (ib0)"]),
        ("0.0.0.0", ["every address and none"]),
        ("10.1.0.0/33", ["neither a network"]),
    ],
)
def test_what_names_no_address_is_told_with_those_there_are(
    node: None, monkeypatch: pytest.MonkeyPatch, setting: str, words: list[str]
) -> None:
    class Up(NamedTuple):
        isup: bool = True

    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(NODE, Up()))
    with pytest.raises(ConfigError) as caught:
        own_address(with_interface(setting))
    text = str(caught.value)
    assert text.startswith("network.interface: ") and all(word in text for word in words), text


def test_an_address_of_the_whole_loopback_network_is_this_machines() -> None:
    assert own_address(with_interface("127.0.0.9")) == "127.0.0.9"
    with pytest.raises(ConfigError, match="no address of this machine"):
        own_address(with_interface("198.51.100.7"))


def test_the_route_to_redis_decides() -> None:
    assert own_address(Config(), "redis://127.0.0.1:6379/0") == "127.0.0.1"
    assert own_address(Config(), "redis://localhost:6379/0") == "127.0.0.1"
    assert own_address(Config(), "redis://:secret@127.0.0.3:6379/0") in ("127.0.0.1", "127.0.0.3")


def test_a_name_that_means_loopback_on_this_machine_alone_is_not_published(
    node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/etc/hosts often gives a machine's own name to 127.0.1.1: on Redis's own node the route ends there."""
    sources = {"node1": "127.0.0.1", address.FAR[0]: "192.168.7.5"}
    monkeypatch.setattr(address, "_source", sources.__getitem__)
    assert own_address(Config(), "redis://node1:6379/0") == "192.168.7.5"


def test_an_unknown_redis_is_told_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        own_address(Config(), "redis://:secret@no-such-host.invalid:6379/0")
    assert "no-such-host.invalid" in str(caught.value) and "secret" not in str(caught.value)


def routes(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """The kernel's answers: `v4`, `v6` for the default routes, `name` for the host's own name."""

    def source(host: str) -> str:
        key = {address.FAR[0]: "v4", address.FAR[1]: "v6"}.get(host, "name")
        if key not in found:
            raise OSError("Network is unreachable")
        return found[key]

    monkeypatch.setattr(address, "_source", source)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({"v4": "192.168.7.5", "v6": "fd12::9", "name": "10.1.0.5"}, "192.168.7.5"),
        ({"v6": "fd12::9", "name": "10.1.0.5"}, "fd12::9"),
        ({"v6": "fe80::1", "name": "10.1.0.5"}, "10.1.0.5"),
        ({"name": "127.0.1.1"}, "10.1.0.5"),  # no default route, a name that means loopback: the first real one
    ],
)
def test_redis_itself_takes_the_default_route_then_the_name_then_what_there_is(
    node: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: dict[str, str], wanted: str
) -> None:
    routes(monkeypatch, **found)
    if found == {"name": "127.0.1.1"}:
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: NODE[name] for name in ("lo", "usb0", "ib0")})
    assert own_address(Config()) == wanted
    assert not caplog.records


def test_a_loopback_address_is_the_last_resort_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    routes(monkeypatch, name="127.0.1.1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": NODE["lo"], "usb0": NODE["usb0"]})
    with caplog.at_level(logging.WARNING):
        assert own_address(Config()) == "127.0.0.1"
    assert "every other machine means itself" in caplog.text


def test_a_host_publishes_nothing_beside_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, Any] = {"redis.url": "redis://127.0.0.1:6379/0"}
    assert reachable_address(Config().changed({"redis.url": "unix:///run/redis.sock"})) == ""
    assert reachable_address(Config().changed(there)) == "127.0.0.1"
    assert reachable_address(Config().changed({**there, "network.interface": "127.0.0.9"})) == "127.0.0.9"
    both = {**there, "network.interface": "127.0.0.9", "sandbox.listen": "127.0.0.8"}
    assert reachable_address(Config().changed(both)) == "127.0.0.8", "sandbox.listen is the override"


def test_a_host_that_can_t_tell_says_so_and_goes_on_but_not_with_a_wrong_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = {"redis.url": "redis://no-such-host.invalid:6379/0"}
    assert reachable_address(Config().changed(lost)) == ""
    assert "other machines can't reach" in caplog.text
    with pytest.raises(ConfigError, match="no interface 'ib7'"):
        reachable_address(Config().changed({**lost, "network.interface": "ib7"}))


def test_ipv6_stands_in_brackets_in_a_url() -> None:
    assert bracketed("fd12::9") == "[fd12::9]"
    assert bracketed("[fd12::9]") == "[fd12::9]"
    assert bracketed("10.1.0.5") == "10.1.0.5"
