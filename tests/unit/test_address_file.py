"""The address file: whole or not at all, for its user alone, and which settings follow it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pipeline import address_file, config as settings, server
from pipeline.address_file import Address, file_of, is_down, last_epoch, publish, read, take_down, withdraw
from pipeline.config import Config
from pipeline.errors import ConfigError, RedisUnavailable

WHOLE: dict[str, Any] = {"url": "redis://n7:6380/2", "password": "s3cret", "epoch": 4, "job": "99", "started": 1.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "address.json"


def test_what_is_published_is_read(file: Path) -> None:
    publish(file, Address(**WHOLE))
    found = read(file)
    assert found == Address(**WHOLE)
    assert (found.host, found.port, found.database) == ("n7", 6380, 2)
    publish(file, Address(**{**WHOLE, "url": "redis://[fd00::7]:1/0", "epoch": 5}))
    assert (read(file).host, read(file).epoch) == ("fd00::7", 5)
    assert os.listdir(file.parent) == ["address.json"], "no draft is left"


def test_only_its_user_can_read_it_whatever_the_umask(file: Path) -> None:
    before = os.umask(0)
    try:
        publish(file, Address(**WHOLE))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_without_room_leaves_the_old_address(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(file, Address(**WHOLE))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        publish(file, Address(**{**WHOLE, "epoch": 5}))
    assert read(file).epoch == 4 and os.listdir(file.parent) == ["address.json"]


def test_the_password_is_not_shown(file: Path) -> None:
    assert "s3cret" not in repr(Address(**WHOLE)) + str([Address(**WHOLE)])


def test_a_later_version_may_say_more(file: Path) -> None:
    file.write_text(json.dumps({**WHOLE, "tls": True}))
    assert read(file) == Address(**WHOLE)


def test_no_file_says_what_starts_a_redis(file: Path) -> None:
    with pytest.raises(RedisUnavailable, match=r"no Redis has published its address in .*: `rollout slurm up` starts"):
        read(file)


def test_a_line_that_is_down_says_so_and_keeps_its_epoch(file: Path) -> None:
    assert last_epoch(file) == 0
    publish(file, Address(**WHOLE))
    withdraw(file, Address(**WHOLE))
    with pytest.raises(RedisUnavailable, match=r"the line is down: its Redis \(job 99\) ended in good order at 20"):
        read(file)
    assert last_epoch(file) == 4 and "s3cret" not in file.read_text()


def test_a_line_that_was_taken_down_is_told_from_one_whose_redis_moves(file: Path) -> None:
    take_down(file)
    assert not file.exists(), "nothing was ever published"
    publish(file, Address(**WHOLE))
    withdraw(file, Address(**WHOLE))
    assert not is_down(file)
    take_down(file)
    assert is_down(file) and last_epoch(file) == 4
    publish(file, Address(**{**WHOLE, "epoch": 5}))
    assert not is_down(file) and read(file).epoch == 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "no JSON object"),
        (json.dumps({**WHOLE, "epoch": "4"}), "epoch is missing or of a wrong type"),
        (json.dumps({name: WHOLE[name] for name in WHOLE if name != "password"}), "password is missing"),
        (json.dumps({**WHOLE, "url": "unix:///x"}), "none of the form redis://HOST:PORT"),
        (json.dumps({**WHOLE, "url": "redis://h:x/0"}), "Port could not be cast"),
        (json.dumps({**WHOLE, "url": "redis://h:1/x"}), "invalid literal"),
    ],
)
def test_what_is_no_address_is_said(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    with pytest.raises(RedisUnavailable, match=f"holds no address of a Redis .*{why}") as caught:
        read(file)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_can_not_be_read_is_said(file: Path) -> None:
    file.mkdir()
    with pytest.raises(RedisUnavailable, match="can't be read: Is a directory"):
        read(file)


def test_which_settings_follow_a_file(tmp_path: Path) -> None:
    def of(**about: str) -> Path | None:
        return file_of(Config().changed({name.replace("__", "."): value for name, value in about.items()}))

    assert of() is None
    assert of(slurm__folder=str(tmp_path)) == tmp_path / "address.json"
    assert of(slurm__folder=str(tmp_path), redis__url="redis://h") is None, "a URL that is set is meant"
    assert of(slurm__folder=str(tmp_path), redis__address_file="/x/a") == Path("/x/a")
    assert of(redis__address_file="a") == Path.cwd() / "a"


def test_a_url_and_a_file_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url and redis\.address_file are both set"):
        settings.load(overrides=["redis.url=redis://h", "redis.address_file=/x"], environ={})


def test_located_says_the_present_address_and_keeps_the_file(file: Path) -> None:
    config = Config().changed({"slurm.folder": str(file.parent), "redis.password_file": "/x"})
    none = server.located(config)
    assert (none.redis.url, none.redis.address_file) == ("", str(file))
    publish(file, Address(**WHOLE))
    found = server.located(none)
    assert (found.redis.url, found.redis.address_file, found.redis.password_file) == (WHOLE["url"], str(file), "")
    publish(file, Address(**{**WHOLE, "url": "redis://n8:1/0"}))
    assert server.located(found).redis.url == "redis://n8:1/0"
    assert address_file.file_of(found) == file
