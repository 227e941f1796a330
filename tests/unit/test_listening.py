"""Where a policy server listens, by which URL workers reach it, and which URLs only its own machine can use."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.loopback import elsewhere, means_its_reader, unreachable
from workers.listening import place

NEAR = {"redis.url": "redis://127.0.0.1:6379/0"}


@pytest.mark.parametrize(
    ("changes", "said", "listen"),
    [
        (NEAR, {}, "127.0.0.1"),
        ({"redis.url": "unix:///run/redis.sock"}, {}, "127.0.0.1"),
        ({**NEAR, "network.interface": "127.0.0.9"}, {}, "127.0.0.9"),
        ({**NEAR, "network.interface": "127.0.0.9"}, {"host": "127.0.0.5"}, "127.0.0.5"),
    ],
)
def test_it_listens_and_is_published_where_redis_is_reached(
    changes: dict[str, Any], said: dict[str, Any], listen: str
) -> None:
    at = place(Config().changed(changes), "it", **said)
    assert at.listen == listen and at.port > 0
    assert at.near == at.far == f"http://{listen}:{at.port}"


def test_everywhere_is_published_as_one_address() -> None:
    at = place(Config().changed({**NEAR, "network.interface": "127.0.0.9"}), "it", host="0.0.0.0")
    assert (at.listen, at.near, at.far) == ("0.0.0.0", f"http://127.0.0.1:{at.port}", f"http://127.0.0.9:{at.port}")
    at = place(Config().changed(NEAR), "it", host="127.0.0.5", advertise="https://gate/policy/")
    assert at.near.startswith("http://127.0.0.5:") and at.far == "https://gate/policy"


def test_a_port_that_is_taken_is_said_with_who_wants_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"the scripted policy can't listen on 127.0.0.1, port {port}: Address"):
            place(Config().changed(NEAR), "the scripted policy", port=port)


@pytest.mark.parametrize(
    ("host", "means"),
    [
        ("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("[::1]", True), ("0.0.0.0", True), ("::", True),
        ("localhost", True), ("a.localhost", True), ("n1", False), ("10.1.0.5", False), ("fd12::9", False), ("", False),
    ],
)  # fmt: skip
def test_what_everybody_means_their_own_machine_by(host: str, means: bool) -> None:
    assert means_its_reader(host) is means


def test_redis_is_elsewhere_where_other_machines_may_reach_it() -> None:
    assert elsewhere("redis://:secret@n1:6379/0") == "n1"
    assert {elsewhere(url) for url in ("", "unix:///run/redis.sock", "redis://localhost", "redis://[::1]:1")} == {""}


def test_a_loopback_address_is_told_only_where_others_may_come() -> None:
    far = "redis://:secret@10.1.0.5:6379/0"
    said = unreachable("http://127.0.0.1:8000", far)
    assert "http://127.0.0.1:8000" in said and "10.1.0.5" in said and "secret" not in said
    assert unreachable("http://localhost:8000/v1", far)
    assert not unreachable("http://n1:8000", far)
    assert not unreachable("http://127.0.0.1:8000", "redis://127.0.0.1:6379/0")
