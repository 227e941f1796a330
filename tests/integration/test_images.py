"""Images: what a name may be, built once however many ask, never half, never evicted while in use."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.config import Config
from pipeline.errors import ConfigError, HandlerError, SandboxError
from tests.services import require
from tests.waiting import sleepers, until
from workers.cli.app import rollout
from workers.sandbox.images import Image, build, hold, manage, resolve, trees
from workers.sandbox.images.cache import Cache
from workers.sandbox.images.files import filesystem
from workers.sandbox.images.resolve import digest_of_file
from workers.sandbox.images.steps import environment, step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().changed({"images.cache": str(tmp_path / "cache")})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small image as a folder: a static busybox, a shell, a note."""
    busybox = require("busybox")
    made = tmp_path_factory.mktemp("images") / "small"
    for name in ("bin", "dev", "etc", "mnt", "opt", "proc", "root", "sys", "tmp", "var/tmp"):
        (made / name).mkdir(parents=True)
    shutil.copy(busybox, made / "bin" / "busybox")
    for name in ("sh", "cat", "id", "touch"):
        (made / "bin" / name).symlink_to("busybox")
    for name in ("hosts", "resolv.conf", "localtime", "group", "passwd"):
        (made / "etc" / name).touch()
    (made / "opt" / "note").write_text("small\n")
    return made


@pytest.fixture(scope="session")
def sif(folder: Path) -> Path:
    """The same as a file."""
    apptainer, made = require("apptainer"), folder.with_name("small.sif")
    subprocess.run([apptainer, "-q", "build", str(made), str(folder)], check=True, capture_output=True)
    return made


def found(config: Config, name: str) -> Image:
    """For tests that have no event loop, because they call commands, which make their own."""
    return asyncio.run(resolve(config, name))


def call(config: Config, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(rollout, [f"--set=images.cache={config.images.cache}", *words])
    return result.exit_code, result.output


# -- what a name may be --------------------------------------------------------------------------------------------


def test_the_host_image_runs_what_this_machine_has(config: Config) -> None:
    apptainer = require("apptainer")
    image = found(config, "host")
    binds = [word for bind in image.binds for word in ("--bind", bind)]
    # the skeleton's own /tmp is kept: the running Python may lie below it
    options = ["--containall", "--cleanenv", "--no-home", "--no-init", "--no-mount", "tmp"]
    command = [apptainer, "-q", "exec", *options, *binds, str(image.path)]
    ran = subprocess.run(
        [*command, sys.executable, "-c", "import os, ssl, msgpack; print(os.path.exists('/etc/shadow'))"],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "False\n"), ran.stderr
    assert found(config, "host") == image


async def test_a_sif_is_unpacked_once_and_named_by_its_content(config: Config, sif: Path, tmp_path: Path) -> None:
    image = await resolve(config, str(sif))
    assert (image.path / "opt" / "note").read_text() == "small\n"
    copy = tmp_path / "other.sif"
    shutil.copy(sif, copy)
    assert await resolve(config, str(copy)) == image
    assert len(manage.listed(config)) == 1


async def test_a_sif_that_changed_is_another_image(config: Config, sif: Path, tmp_path: Path) -> None:
    mine, cache = tmp_path / "mine.sif", Cache.of(config)
    shutil.copy(sif, mine)
    first = await digest_of_file(cache, mine)
    old = mine.stat()
    mine.write_bytes(mine.read_bytes()[:-1] + b"x")
    os.utime(mine, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    assert await digest_of_file(cache, mine) != first


async def test_a_folder_is_used_in_place(config: Config, folder: Path) -> None:
    image = await resolve(config, str(folder))
    assert image.path == folder and image.binds == ()
    with hold(image):
        assert manage.listed(config) == []
    assert (await resolve(config, str(folder))).digest == image.digest


async def test_a_relative_path_starts_at_the_configs_folder(config: Config, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"images: {{cache: {config.images.cache}}}\n")
    (tmp_path / "mine").symlink_to(folder)
    from pipeline.config import load

    read = load(tmp_path / "config.yaml")
    assert (await resolve(read, "./mine")).path == tmp_path / "mine"


def test_an_archive_is_pulled_without_a_registry(config: Config, folder: Path, tmp_path: Path) -> None:
    require("apptainer")
    archive = tmp_path / "small.tar"
    docker_archive(folder, archive)
    url = f"docker-archive:{archive}"
    code, said = call(config, "image", "pull", url, "packed")
    assert code == 0, said
    image = found(config, "packed")
    assert (image.path / "opt" / "note").read_text() == "small\n"
    assert found(config, url) == image


def docker_archive(folder: Path, archive: Path) -> None:
    """What `docker save` writes: a layer, its configuration, a manifest."""
    import hashlib

    layer = BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(folder, arcname=".")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    about = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
    about["rootfs"]["diff_ids"] = [f"sha256:{digest}"]  # type: ignore[index]
    manifest = [{"Config": "config.json", "RepoTags": ["small:1"], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for name, data in (
            ("layer.tar", layer.getvalue()),
            ("config.json", json.dumps(about).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))


async def test_a_registry_that_is_not_there_is_a_sentence_with_apptainers_words(config: Config) -> None:
    require("apptainer")
    with pytest.raises(SandboxError) as caught:
        await resolve(config, "docker://127.0.0.1:1/none:1")
    said = str(caught.value)
    assert "docker://127.0.0.1:1/none:1 failed" in said and "refused" in said and "reach the registry?" in said
    assert list((Path(config.images.cache) / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "the image has no name: set sandbox.image"),
        ("hots", "there is no image 'hots' on this machine: did you mean 'host'? (there are: debian, host, python; "),
        ("mine", "). `rollout image build mine --from IMAGE --script FILE` makes one of this name"),
        ("/nowhere/x.sif", "there is no image at /nowhere/x.sif"),
        ("{folder}.sfi", "there is no image at {folder}.sfi: did you mean {folder}.sif?"),
        ("{folder}/opt", "the folder {folder}/opt is no image: it has neither bin nor usr/bin"),
        ("{folder}/opt/note", "{folder}/opt/note is no SIF"),
        ("oci-archive:/nowhere.tar:1", "there is no file /nowhere.tar"),
    ],
)
async def test_a_bad_name_is_a_sentence(config: Config, folder: Path, sif: Path, name: str, said: str) -> None:
    with pytest.raises(HandlerError) as caught:
        await resolve(config, name.format(folder=folder))
    assert said.format(folder=folder) in str(caught.value)


async def test_a_disk_that_takes_nothing_is_a_sentence(config: Config) -> None:
    cache = Cache.of(config)
    (cache.folder / "locks").rmdir()
    (cache.folder / "locks").touch()
    with pytest.raises(SandboxError, match="the image 'host' can't be used here: .*Not a directory"):
        await resolve(config, "host")


# -- built once, never half ------------------------------------------------------------------------------------------

SLEEP = str(100_000 + os.getpid())
"""Seconds that a step of these tests waits: by them its process is told from any other's."""

RESOLVE = """
import asyncio, sys
from pipeline.config import Config
from workers.sandbox.images import resolve
config = Config().changed({"images.cache": sys.argv[1]})
print(asyncio.run(resolve(config, sys.argv[2])).digest)
"""


def python(code: str, *words: str, **more: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_four_processes_build_once(config: Config, sif: Path, tmp_path: Path) -> None:
    log, tool = tmp_path / "calls", tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("apptainer")} "$@"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    racers = [python(RESOLVE, config.images.cache, str(sif), PATH=path) for _ in range(4)]
    ends = [racer.communicate(timeout=60) for racer in racers]
    assert len({out for out, _ in ends}) == 1 and ends[0][0], ends
    assert sum(" build " in f" {line} " for line in log.read_text().splitlines()) == 1


HALF = """
import asyncio, sys
from pathlib import Path
from pipeline.config import Config
from workers.sandbox.images import build
from workers.sandbox.images.cache import Cache
from workers.sandbox.images.steps import step

async def make(staging, lock):
    (staging / "rootfs").mkdir()
    (staging / "rootfs" / "half").touch()
    print("half", flush=True)
    await step("waiting", ["run", "sleep", sys.argv[2]], scratch=staging, lock=lock)

cache = Cache.of(Config().changed({"images.cache": sys.argv[1]}))
asyncio.run(build.once(cache, "d" * 64, "sif", "x", make))
"""


async def whole(staging: Path, _: int) -> None:
    (staging / "rootfs" / "bin").mkdir(parents=True)


async def test_a_killed_builder_leaves_nothing_that_counts(config: Config) -> None:
    builder = python(HALF, config.images.cache, SLEEP)
    assert builder.stdout is not None and builder.stdout.readline() == "half\n"
    until(lambda: sleepers(SLEEP))
    builder.kill()
    builder.communicate()
    cache = Cache.of(config)
    assert cache.entries() == []
    image = await asyncio.wait_for(build.once(cache, "d" * 64, "sif", "x", whole), 20)
    assert sorted(item.name for item in image.path.iterdir()) == ["bin"]
    assert sleepers(SLEEP) == []  # what the dead builder had started ended with it, before the next one began


async def test_what_a_killed_builder_left_is_tidied_away(config: Config) -> None:
    builder = python(HALF, config.images.cache, SLEEP)
    assert builder.stdout is not None and builder.stdout.readline() == "half\n"
    left = Path(config.images.cache) / "staging" / ("d" * 64)
    manage.evict(config)
    assert left.is_dir()  # its builder lives
    until(lambda: sleepers(SLEEP))
    builder.kill()
    builder.communicate()
    until(lambda: not sleepers(SLEEP))
    manage.evict(config)
    assert not left.exists()


async def test_a_cancelled_build_ends_what_it_started(config: Config) -> None:
    started = asyncio.Event()

    async def make(staging: Path, lock: int) -> None:
        started.set()
        await step("waiting", ["run", "sleep", SLEEP], scratch=staging, lock=lock)

    task = asyncio.create_task(build.once(Cache.of(config), "e" * 64, "sif", "x", make))
    await started.wait()
    await asyncio.to_thread(until, lambda: sleepers(SLEEP))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sleepers(SLEEP) == []
    await asyncio.wait_for(build.once(Cache.of(config), "e" * 64, "sif", "x", whole), 20)


async def test_a_step_that_takes_too_long_is_ended_and_said(config: Config, tmp_path: Path) -> None:
    async with Cache.of(config).building("k") as (staging, lock):
        with pytest.raises(SandboxError, match=r"waiting took longer than 0\.5 s and was ended"):
            await step("waiting", ["run", "sleep", SLEEP], scratch=staging, lock=lock, seconds=0.5)
    assert sleepers(SLEEP) == []


async def test_a_failed_step_shows_its_output(config: Config) -> None:
    async with Cache.of(config).building("k") as (staging, lock):
        with pytest.raises(SandboxError, match=r"trying failed \(exit code 3\): no room"):
            await step("trying", ["run", "sh", "-c", "echo no room >&2; exit 3"], scratch=staging, lock=lock)


async def test_a_failed_step_says_first_what_its_error_was(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    script = "echo I: working; echo E: Unable to locate package jqq; echo E: setup failed; exit 25"
    async with Cache.of(config).building("k") as (staging, lock):
        with pytest.raises(
            SandboxError, match=r"trying failed \(exit code 25\): Unable to locate package jqq\nIts outp"
        ):
            await step("trying", ["run", "sh", "-c", script], scratch=staging, lock=lock)
        assert caplog.messages == ["trying ..."]
        await step("trying", ["run", "true"], scratch=staging, lock=lock)
    assert re.fullmatch(r"trying: done, \d+\.\d s", caplog.messages[-1])


def test_a_build_sees_nothing_of_the_workers_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SECRET", "APPTAINERENV_X", "SINGULARITYENV_X", "APPTAINER_DOCKER_PASSWORD", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "told")
    told = {name for name, value in environment(tmp_path).items() if value == "told"}
    assert told == {"HTTPS_PROXY"}
    assert environment(tmp_path, registry=True)["APPTAINER_DOCKER_PASSWORD"] == "told"


# -- images of one's own ---------------------------------------------------------------------------------------------


def test_a_script_makes_an_image_of_another_name(config: Config, folder: Path, tmp_path: Path) -> None:
    require("apptainer")
    script = tmp_path / "setup.sh"
    script.write_text("echo made by $(id -u) > /opt/made\n")
    file = tmp_path / "mine.sif"
    words = ("image", "build", "mine", "--from", str(folder), "--script", str(script))
    code, said = call(config, *words, "--sif", str(file))
    assert code == 0, said
    image = found(config, "mine")
    assert (image.path / "opt" / "made").read_text() == "made by 0\n"
    assert not (image.path / build.SETUP).exists() and not (folder / "opt" / "made").exists()
    packed = found(config, str(file))
    assert (packed.path / "opt" / "made").read_text() == "made by 0\n"
    assert call(config, *words)[0] == 0 and found(config, "mine") == image
    assert call(config, *words, "--again")[0] == 0 and found(config, "mine") != image


def test_a_script_that_fails_is_said_and_leaves_nothing(config: Config, folder: Path, tmp_path: Path) -> None:
    require("apptainer")
    script = tmp_path / "setup.sh"
    script.write_text("false\necho not reached\n")
    code, said = call(config, "image", "build", "mine", "--from", str(folder), "--script", str(script))
    assert code == 1 and "the script of extra steps failed (exit code 1)" in said and "not reached" not in said
    assert manage.listed(config) == [] and list((Path(config.images.cache) / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("build", "mine"), 2, "'mine' is no recipe (recipes: debian, host, python): say --from IMAGE"),
        (("build", "debian", "--from", "host"), 1, "debian is a recipe's name"),
        (("build", "a/b", "--from", "host"), 1, "'a/b' is no name for an image"),
        (("build", "mine", "--from", "host", "--script", "/nowhere.sh"), 1, "/nowhere.sh can't be read"),
        (("build", "host", "--param", "suite"), 2, "'suite' is no NAME=VALUE"),
        (("pull", "debian"), 2, "'debian' is no registry's URL"),
        (("prefetch",), 2, "name images, or set images.prefetch"),
        (("evict", "none"), 1, "there is no image 'none' in"),
        (("evict", "none", "--all"), 2, "not both"),
    ],
)
def test_wrong_use_is_a_sentence(config: Config, words: tuple[str, ...], code: int, said: str) -> None:
    got, output = call(config, "image", *words)
    assert got == code and said in output, output


def test_prefetch_says_of_each_image_whether_it_is_ready(config: Config) -> None:
    code, said = call(config, "image", "prefetch", "host", "hots", "--json")
    assert code == 1 and json.loads(said)["host"] == "" and "did you mean 'host'" in json.loads(said)["hots"]


# -- eviction --------------------------------------------------------------------------------------------------------


async def fill(config: Config, *digests: str) -> None:
    """Entries of about 1 MB, the first one the longest unused."""

    async def make(staging: Path, _: int) -> None:
        await whole(staging, _)
        (staging / "rootfs" / "data").write_bytes(os.urandom(10**6))

    for at, digest in enumerate(digests):
        await build.once(Cache.of(config), digest, "sif", f"/{digest}.sif", make)
        os.utime(Path(config.images.cache) / "locks" / digest, (at + 1, at + 1))


async def test_the_longest_unused_go_first_and_only_as_many_as_needed(config: Config) -> None:
    await fill(config, "aaaaaaaa", "bbbbbbbb", "cccccccc")
    config = config.changed({"images.keep_gb": 0.0022})
    assert manage.evict(config).digests == ["aaaaaaaa"]
    assert [entry.digest for entry in Cache.of(config).entries()] == ["cccccccc", "bbbbbbbb"]
    assert manage.evict(config).digests == []


async def test_evict_says_which_went_and_counts_each_once(config: Config) -> None:
    await fill(config, "aaaaaaaa", "bbbbbbbb", "cccccccc")
    for name in ("one", "two"):
        Cache.of(config).give_name(name, "bbbbbbbb")
    code, said = await asyncio.to_thread(call, config, "image", "evict", "one", "two", "cccccccc")
    lines = said.splitlines()
    assert code == 0 and lines[:2] == ["evicted one, two (bbbbbbbb)", "evicted /cccccccc.sif (cccccccc)"]
    assert lines[2].startswith("2 evicted, ") and [item.digest for item in manage.listed(config)] == ["aaaaaaaa"]


async def test_a_name_that_is_taken_from_another_image_is_told(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await fill(config, "aaaaaaaa", "bbbbbbbb")
    for digest in ("aaaaaaaa", "aaaaaaaa", "bbbbbbbb"):
        Cache.of(config).give_name("mine", digest)
    assert caplog.messages == ["mine stands for the image bbbbbbbb now; before, it was aaaaaaaa"]


async def test_one_in_use_is_never_evicted(config: Config) -> None:
    await fill(config, "aaaaaaaa", "bbbbbbbb")
    image = Cache.of(config).image("aaaaaaaa")
    assert image is not None
    with hold(image):
        assert [item.in_use for item in manage.listed(config)] == [True, False]
        code, said = call(config, "image", "evict", "aaaaaaaa")
        assert code == 1 and "in use, so not evicted: /aaaaaaaa.sif" in said
        assert manage.evict(config, everything=True).digests == ["bbbbbbbb"]
        assert image.path.is_dir()
    assert manage.evict(config, everything=True).digests == ["aaaaaaaa"]
    with pytest.raises(SandboxError, match="was evicted just now"):
        hold(image)


HOLD = """
import sys
from pipeline.config import Config
from workers.sandbox.images import hold
from workers.sandbox.images.cache import Cache
held = hold(Cache.of(Config().changed({"images.cache": sys.argv[1]})).image(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


async def test_a_holder_that_is_killed_holds_nothing(config: Config) -> None:
    await fill(config, "aaaaaaaa")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, config.images.cache, "aaaaaaaa"],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert manage.evict(config, everything=True).in_use == ["/aaaaaaaa.sif (aaaaaaaa)"]
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert manage.evict(config, everything=True).digests == ["aaaaaaaa"]


async def test_what_the_settings_name_is_not_evicted_for_room(config: Config) -> None:
    await fill(config, "aaaaaaaa", "bbbbbbbb")
    config = config.changed({"images.keep_gb": 0.000001, "images.prefetch": ["/aaaaaaaa.sif"]})
    assert manage.evict(config).digests == ["bbbbbbbb"]
    assert [item.pinned for item in manage.listed(config)] == [True]
    assert manage.evict(config, ["/aaaaaaaa.sif"]).digests == ["aaaaaaaa"]


async def test_an_image_with_folders_without_rights_is_evicted_whole(config: Config) -> None:
    await fill(config, "aaaaaaaa")
    rootfs = Path(config.images.cache) / "images" / "aaaaaaaa" / "rootfs"
    (rootfs / "shut").mkdir()
    (rootfs / "shut" / "file").touch()
    (rootfs / "shut").chmod(0)
    assert manage.evict(config, everything=True).digests == ["aaaaaaaa"]
    assert list((Path(config.images.cache) / "staging").iterdir()) == []


async def test_ls_tells_what_is_there(config: Config) -> None:
    await resolve(config, "host")
    code, said = call(config, "image", "ls", "--json")
    (row,) = json.loads(said)
    assert code == 0 and row["source"] == "host" and row["kind"] == "recipe" and row["pinned"] and not row["in_use"]
    assert row["size"] == trees.size(Path(config.images.cache) / "images" / row["digest"] / "rootfs")
    code, said = call(config, "image", "ls")
    assert code == 0 and "host" in said and "pinned" in said


# -- the folder ------------------------------------------------------------------------------------------------------


def test_without_a_setting_the_cache_is_a_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = Cache.of(Config())
    assert cache.folder == tmp_path / f"rollout-images-{os.getuid()}"
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"rollout-images-{os.getuid()}").mkdir()
    (tmp_path / f"rollout-images-{os.getuid()}").chmod(0o777)
    with pytest.raises(ConfigError, match="is not a private folder of ours"):
        Cache.of(Config())


def test_a_cache_that_cant_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"images.cache: .*file/x can't be used"):
        Cache.of(Config().changed({"images.cache": str(tmp_path / "file" / "x")}))


def test_file_systems_are_told_apart() -> None:
    assert filesystem(Path("/proc/self")) == "proc"
    assert filesystem(Path("/dev/shm")) in {"tmpfs", "devtmpfs", filesystem(Path("/"))}
