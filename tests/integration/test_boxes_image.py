"""Boxes of real Apptainer whose image holds a repository: its folders go, come again and move, as git and builds do."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import SandboxError
from tests.boxes import Site, image_cache, run, short_root, site
from tests.services import require
from workers.sandbox.box import Spec
from workers.sandbox.boxes import apptainer, overlay
from workers.sandbox.images import cache, host, resolve

__all__ = ["image_cache", "short_root", "site"]

COMMITS = {"first": ("old/deep/a", "both/a", "kind/a"), "second": ("new/deep/b", "both/b", "kind")}
"""Commit -> its files; the last one is a folder in the first commit and a file in the second."""


@pytest.fixture
def image(tmp_path: Path, image_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder image with a repository at /testbed, in which the commit `first` is checked out."""
    require("git")
    folder = tmp_path / "image, with: odd name"
    folder.mkdir()
    host.make(folder)
    repository = folder / "testbed"
    repository.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(repository)]
    subprocess.run([*git, "init", "-q"], check=True)
    for commit, files in COMMITS.items():
        subprocess.run([*git, "rm", "-rq", "--ignore-unmatch", "."], check=True)
        repository.mkdir(exist_ok=True)
        for name in files:
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(commit)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", commit], check=True)
        subprocess.run([*git, "tag", commit], check=True)
    subprocess.run([*git, "checkout", "-q", "first"], check=True)
    bound = cache.Image(folder, "0" * 64, host.binds())  # programs come from this machine, as with the recipe `host`

    async def resolved(config: object, name: str) -> cache.Image:
        return bound if name == str(folder) else await resolve(config, name)  # type: ignore[arg-type]

    monkeypatch.setattr(apptainer, "resolve", resolved)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if ".git" not in path.parts)


async def test_folders_of_the_image_go_and_come_again(site: Site, image: Path) -> None:
    before = names(image)
    box = await site.box("apptainer", Spec(image=str(image)))
    done = await run(box, "cd /testbed && rm -rf old && mkdir old && find old && touch old/new && rmdir kind")
    assert done.text == "old\nrmdir: failed to remove 'kind': Directory not empty", done
    assert await run(box, "cd /testbed && mv both moved && cat moved/a && ls") == (0, "firstkind\nmoved\nold")
    assert await run(box, "rm -rf /srv && mkdir -p /srv/a/b && rm -r /srv && mkdir /srv && ls -A /srv") == (0, "")
    await box.restart()
    assert await run(box, "cd /testbed && find old moved && ls -A /srv") == (0, "old\nold/new\nmoved\nmoved/a")
    assert names(image) == before


async def test_a_rename_of_an_image_folder_is_made_or_is_said_to_cross_devices(site: Site, image: Path) -> None:
    box = await site.box("apptainer", Spec(image=str(image)))
    script = "import errno, os\ntry:\n os.rename('/testbed/both', '/testbed/moved')\n print('made')\n"
    script += "except OSError as error:\n print(errno.errorcode[error.errno])"
    assert (await run(box, 'python3 -c "$1"', script)).text in ("made", "EXDEV")


async def test_git_goes_from_commit_to_commit(site: Site, image: Path) -> None:
    box = await site.box("apptainer", Spec(image=str(image), workdir="/testbed"))
    git = "cd /testbed && git config --global safe.directory '*' &&"
    for commit in ("second", "first", "second", "first"):
        done = await run(
            box, f"{git} git checkout -q {commit} && git status --short && git ls-files && cat $(git ls-files)"
        )
        assert done == (0, "\n".join([*sorted(COMMITS[commit]), commit * 3]))
    assert await run(box, f"{git} rm -rf old both && git checkout -q . && git clean -xdfq && cat old/deep/a") == (
        0, "first",
    )  # fmt: skip
    assert await run(box, f"{git} git stash -q 2>&1; git reset -q --hard second && ls") == (0, "both\nkind\nnew")


async def test_without_our_overlay_boxes_have_apptainers(
    site: Site, image: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overlay, "_LAUNCH", f'echo "{overlay.REFUSED}" >&2; exit 1')
    with caplog.at_level(logging.WARNING):
        boxes = [await site.box("apptainer", Spec(image=str(image)), name=name) for name in ("one", "two")]
    assert caplog.text.count("Apptainer's") == 1
    assert (await run(boxes[0], "touch /testbed/x && cat /testbed/both/a")) == (0, "first")
    assert "Input/output error" in (await run(boxes[1], "rm -rf /testbed/old && mkdir /testbed/old")).text


async def test_where_our_overlay_was_mounted_once_it_is_not_given_up(
    site: Site, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.box("apptainer", Spec(image=str(image)), name="one")
    with monkeypatch.context() as changed:
        changed.setattr(overlay, "_LAUNCH", f'echo "{overlay.REFUSED}" >&2; exit 1')
        with pytest.raises(SandboxError, match=overlay.REFUSED):
            await site.box("apptainer", Spec(image=str(image)), name="two")
    box = await site.box("apptainer", Spec(image=str(image)), name="three")
    assert await run(box, "rm -rf /testbed/old && mkdir /testbed/old") == (0, "")


async def test_mount_points_go_where_the_images_links_lead(site: Site, image: Path) -> None:
    for place in ("run", "tmp"):  # of the host's skeleton: with mount points, where the interpreter lies there
        shutil.rmtree(image / place)
    for place, target in {"run": "var/../var/run", "tmp": "/var/tmp"}.items():
        (image / place).symlink_to(target)
    (image / "etc/hosts").unlink()
    box = await site.box("apptainer", Spec(image=str(image)))
    done = await run(box, "cd /run/rollout && pwd -P && stat -c %a / && grep -c localhost /etc/hosts && touch /tmp/x")
    assert done == (0, "/var/run/rollout\n755\n2")
    (image / "run").unlink()
    (image / "run").symlink_to("/run")
    with pytest.raises(SandboxError, match="lead round in circles"):
        await site.box("apptainer", Spec(image=str(image)), name="round")
