"""Errors of Redis as sentences, what a server says of itself, and addresses without their passwords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis import exceptions

from pipeline import connection
from pipeline.config import Config
from pipeline.errors import ConfigError, RedisUnavailable

GOOD: dict[str, Any] = {
    "redis_version": "7.0.15",
    "aof_enabled": 1,
    "maxmemory": 1000,
    "used_memory": 10,
    "maxmemory_policy": "noeviction",
    "role": "master",
    "loading": 0,
}
URL = "redis://line:s3cret@host:6379/0"


def facts(**changes: Any) -> connection.ServerFacts:
    return connection._facts(GOOD | changes, URL)


def test_a_good_server_is_not_warned_about() -> None:
    found = facts()
    assert (found.kind, found.version, found.maxmemory, found.warnings) == ("Redis", "7.0.15", 1000, ())


def test_valkey_is_known_by_its_name() -> None:
    found = facts(valkey_version="9.1.2", redis_version="7.2.4")
    assert (found.kind, found.version) == ("Valkey", "9.1.2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aof_enabled": 0}, "set `appendonly yes`"),
        ({"maxmemory_policy": "allkeys-lru"}, "evicts keys (allkeys-lru)"),
        ({"maxmemory": 0}, "memory.high) is off"),
        ({"role": "slave"}, "is a replica"),
        ({"cluster_enabled": 1}, "cluster mode"),
    ],
)
def test_warnings(changes: dict[str, Any], words: str) -> None:
    (warning,) = facts(**changes).warnings
    assert words in warning
    assert "s3cret" not in warning


@pytest.mark.parametrize("version", ["5.0.7", "6.0.16", "0"])
def test_too_old_a_server(version: str) -> None:
    sentence = rf"^Redis {version} at redis://line:\*\*\*@host:6379/0 is too old: 6\.2 or newer is needed$"
    with pytest.raises(RedisUnavailable, match=sentence):
        facts(redis_version=version)


def test_a_loading_server() -> None:
    with pytest.raises(RedisUnavailable, match="is loading its data, about 7 s left: wait"):
        facts(loading=1, loading_eta_seconds=7)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (exceptions.AuthenticationError("invalid username-password pair"), "refused the password"),
        (exceptions.ConnectionError("invalid username-password pair or user is disabled."), "refused the password"),
        (exceptions.AuthenticationError("Authentication required."), "wants a password"),
        (exceptions.AuthenticationError("AUTH called without any password configured"), "has no password"),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "is loading"),
        (exceptions.ReadOnlyError("You can't write"), "is a replica"),
        (exceptions.OutOfMemoryError("command not allowed"), "reached its maxmemory"),
        (exceptions.NoPermissionError("no permissions to run 'info'"), "more rights"),
        (exceptions.TimeoutError("Timeout reading from host:6379"), "did not answer in time"),
        (exceptions.ConnectionError("Error 111 connecting to host:6379. Connection refused."), "is it running"),
        (ConnectionResetError(104, "Connection reset by peer"), "can't be reached"),
        (exceptions.ResponseError("ERR s3cret wrong"), "answered with an error: ERR *** wrong"),
    ],
)
def test_errors_are_sentences_without_the_password(error: Exception, words: str) -> None:
    sentence = connection.explain(error, URL)
    assert words in sentence
    assert "redis://line:***@host:6379/0" in sentence
    assert "s3cret" not in sentence


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "redis://line:***@host:6379/0"),
        ("redis://:p%40ss@host/1", "redis://:***@host/1"),
        ("unix://:p@/run/x.sock?db=1", "unix://:***@/run/x.sock?db=1"),
        ("redis://host:1", "redis://host:1"),
        ("redis://user@host:1", "redis://user@host:1"),
    ],
)
def test_redacted(url: str, shown: str) -> None:
    assert connection.redacted(url) == shown


def test_no_url_and_a_bad_one_are_sentences() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url is empty"):
        connection.connect(Config())
    with pytest.raises(ConfigError, match=r"redis\.url: http://:\*\*\*@h is wrong, wanted redis://HOST:PORT"):
        connection.connect(Config().changed({"redis.url": "http://:pw@h"}))


def test_the_password_comes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("pässword\nmore\n", encoding="utf-8")
    config = Config().changed({"redis.url": "redis://h", "redis.password_file": str(path)})
    with connection.connect_sync(config) as client:
        assert client.connection_pool.connection_kwargs["password"] == "pässword"


def test_a_missing_or_empty_password_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "password"
    with pytest.raises(ConfigError, match=r"redis\.password_file: .* can't be read: No such file"):
        connection.read_password(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty, wanted the password in its first line"):
        connection.read_password(path)


def test_the_clients_do_not_repeat_by_themselves() -> None:
    config = Config().changed({"redis.url": "redis://h"})
    with connection.connect_sync(config, blocking=True, name="a worker\n1") as client:
        options = client.connection_pool.connection_kwargs
    assert options["retry"].get_retries() == 0
    assert options["socket_timeout"] == 5.0 + connection.BLOCK_SECONDS
    assert options["client_name"] == "a-worker-1"
