"""A real instance of the SWE family for tests, and an image for it: pipdeptree 2.12.0 as a git repository at /testbed.

The repository leaks its fix in every way that is known (branch, tag, remote, reflog, stash, note, dangling commit), so
that INIT has something to hide. The image is this machine's /usr and Python with an environment at /opt/env; it is made
once, in `.ci/cache`, from the sdist and the wheels that pip gets from its index (half a minute the first time).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.config import Config
from tests.data import CACHE, pipdeptree
from tests.services import require
from workers.sandbox.images import build, host
from workers.sandbox.images.cache import Cache

IMAGE = "swe-pipdeptree"
IMAGES = CACHE / "images"
"""The cache of images that has it: set `images.cache` to this."""

SDIST = "pipdeptree==2.12.0"
NEEDED = ("pip==24.3.1", "pytest==8.3.4", "pytest-mock==3.14.0", "virtualenv==20.28.0", "graphviz==0.20.3")
WORKDIR = "/testbed"
PRELUDE = "export PATH=/opt/env/bin:$PATH"

NAMES = ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME")
WHO = dict.fromkeys(NAMES, "Some Body") | {name.replace("NAME", "EMAIL"): "some@body.invalid" for name in NAMES}
WHEN = {"GIT_AUTHOR_DATE": "2023-07-15T12:00:00Z", "GIT_COMMITTER_DATE": "2023-07-15T12:00:00Z"}
ALONE = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_NO_REPLACE_OBJECTS": "1",
    "PATH": os.environ["PATH"], "HOME": "/",
}  # fmt: skip


class Instance(NamedTuple):
    """`row`: the task's data. `base`: its base commit; `fixes`: commits that hold the fix, by where they are hidden."""

    row: dict[str, Any]
    base: str
    fixes: dict[str, str]

    def config(self, config: Config) -> Config:
        """The configuration with this instance's image."""
        return config.changed({"images.cache": str(IMAGES), "sandbox.driver": "apptainer"})


def git(folder: Path, *words: str, feed: str | None = None) -> str:
    """Run git; what it printed. Dates and names are always the same, so ids are too."""
    done = subprocess.run(
        ["git", "-C", str(folder), *words], input=feed, capture_output=True, text=True, check=False,
        env={**ALONE, **WHO, **WHEN},
    )  # fmt: skip
    assert done.returncode == 0, f"git {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def leak(folder: Path, patch: str) -> tuple[str, dict[str, str]]:
    """Make `folder` a repository at a base commit, and hide commits in it in which `patch` is applied.

    (base commit, commits with the fix). The folder is left at a later commit, which holds the fix too.
    """
    git(folder, "init", "-q", "-b", "main")
    first = sorted(item.name for item in folder.iterdir() if item.is_file() and item.name != ".git")
    git(folder, "add", "--", *first)
    git(folder, "commit", "-q", "-m", "The beginning")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "The base")
    base = git(folder, "rev-parse", "HEAD")
    git(folder, "tag", "v1", base)
    fixes: dict[str, str] = {}
    for where in ("branch", "tag", "remote", "reflog", "stash", "note", "dangling", "replace", "head"):
        git(folder, "checkout", "-q", "--detach", base)
        git(folder, "apply", "--index", "-", feed=patch)
        if where == "stash":
            git(folder, "stash")
            fixes[where] = git(folder, "rev-parse", "stash@{0}")
            continue
        tree = git(folder, "write-tree")
        fix = fixes[where] = git(folder, "commit-tree", tree, "-p", base, "-m", f"The fix, {where}")
        git(folder, "reset", "-q", "--hard", base)
        if where == "branch":
            git(folder, "branch", "fix", fix)
        elif where == "tag":
            git(folder, "tag", "-a", "v2", fix, "-m", "with the fix")
        elif where == "remote":
            git(folder, "remote", "add", "origin", "https://example.invalid/x.git")
            git(folder, "update-ref", "refs/remotes/origin/main", fix)
        elif where == "note":
            git(folder, "notes", "add", "-m", f"see {fix}", base)
        elif where == "replace":
            git(folder, "update-ref", f"refs/replace/{base}", fix)
        elif where in ("reflog", "head"):
            git(folder, "checkout", "-q", "main")
            git(folder, "reset", "-q", "--hard", fix)
    (folder / ".git" / "ORIG_HEAD").write_text(fixes["dangling"] + "\n")
    return base, fixes


def make_image(config: Config) -> Instance:
    """Make the image, unless it is there, and tell of its instance. Skips the test where pip can't get the parts."""
    return asyncio.run(_make_image(config))


async def _make_image(config: Config) -> Instance:
    recipe = Path(__file__).read_bytes() + host.digest().encode() + " ".join([SDIST, *NEEDED]).encode()
    digest = hashlib.sha256(recipe).hexdigest()
    row = pipdeptree()

    async def fill(staging: Path, _: int) -> None:
        await asyncio.to_thread(_fill, staging / "rootfs", staging / "work", row["patch"])

    cache = Cache.of(config)
    image = await build.once(cache, digest, "derived", "tests/swe_task.py", fill, host.binds())
    cache.give_name(IMAGE, image.digest)
    about = json.loads((image.path / "opt" / "instance.json").read_text())
    changed = {"base_commit": about["base"], "image": IMAGE, "workdir": WORKDIR, "prelude": PRELUDE}
    return Instance({**row, **changed}, about["base"], about["fixes"])


def _fill(root: Path, work: Path, patch: str) -> None:
    root.mkdir()
    work.mkdir()
    host.make(root)
    testbed = root / WORKDIR.strip("/")
    with tarfile.open(sdist()) as archive:
        archive.extractall(work, filter="data")
    shutil.move(next(work.iterdir()), testbed)
    (testbed / "PKG-INFO").unlink()
    base, fixes = leak(testbed, patch)
    (testbed / "notes.local").write_text("left by whoever built the image\n")
    _environment(root / "opt" / "env")
    shutil.rmtree(work)
    (root / "opt" / "instance.json").write_text(json.dumps({"base": base, "fixes": fixes}))


def _environment(place: Path) -> None:
    """A virtual environment that will lie at /opt/env, with the repository as an editable installation."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, capture_output=True)
    _pip("install", "-q", "--target", str(place / "packages"), *NEEDED)
    site = next((place / "lib").glob("python3*")) / "site-packages"
    shutil.copytree(place / "packages", site, dirs_exist_ok=True)
    shutil.rmtree(place / "packages")
    (site / "pipdeptree-editable.pth").write_text(f"{WORKDIR}/src\n")
    for name in ("pytest", "py.test"):
        (place / "bin" / name).write_text("#!/opt/env/bin/python\nimport sys, pytest\nsys.exit(pytest.main())\n")
        (place / "bin" / name).chmod(0o755)


def sdist() -> Path:
    name = SDIST.replace("==", "-") + ".tar.gz"
    if not (CACHE / name).exists():
        _pip("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(CACHE), SDIST)
    return CACHE / name


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip can't get what the SWE instance is made of: {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="session")
def swe_instance() -> Instance:
    """The instance, with its image ready in IMAGES."""
    for program in ("apptainer", "git"):
        require(program)
    config = Config().changed({"images.cache": str(IMAGES)})
    with ThreadPoolExecutor(1) as pool:  # pytest's own event loop stays as it is
        return pool.submit(make_image, config).result()
