"""INIT of the SWE family: at the base commit, clean, and nothing that shows the fix, whatever the image's git held."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from handlers.swe.patch import take
from handlers.swe.repository import Prepared, prepare
from pipeline.errors import SandboxError, TaskError
from pipeline.interfaces import Output
from tests.integration.test_swe_patch import Here, home, task_of
from tests.swe_task import ALONE, git, leak

__all__ = ["home"]

FIX = """\
diff --git a/m.py b/m.py
--- a/m.py
+++ b/m.py
@@ -1 +1 @@
-x = 1
+x = 2
diff --git a/only_fixed.py b/only_fixed.py
new file mode 100644
--- /dev/null
+++ b/only_fixed.py
@@ -0,0 +1 @@
+y = 1
"""


@pytest.fixture
def work(home: Path) -> Path:
    folder = home / "work"
    (folder / "src").mkdir(parents=True)
    (folder / "m.py").write_text("x = 1\n")
    (folder / "src" / "n.py").write_text("z = 1\n")
    return folder


async def init(folder: Path, commit: str) -> Prepared:
    return await prepare(Here(folder.parent), task_of(str(folder), commit))  # type: ignore[arg-type]


def known(folder: Path, commit: str) -> bool:
    done = subprocess.run(["git", "-C", str(folder), "cat-file", "-e", commit], capture_output=True, env=ALONE)
    return done.returncode == 0


def base_of(folder: Path) -> str:
    """Make `folder` a repository of one commit."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    return git(folder, "rev-parse", "HEAD")


def status(folder: Path) -> str:
    return git(folder, "status", "--porcelain")


async def test_h26_only_the_base_commits_ancestors_are_left(work: Path) -> None:
    base, fixes = leak(work, FIX)
    assert all(known(work, fix) for fix in fixes.values()) and (work / "only_fixed.py").exists()
    ready = await init(work, base)
    assert ready == (base, ready.git, 2)
    assert [where for where, fix in fixes.items() if known(work, fix)] == []
    assert git(work, "log", "--all", "--format=%s") == "The base\nThe beginning"
    assert git(work, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(work, "tag") == git(work, "remote", "-v") == git(work, "stash", "list") == git(work, "notes") == ""
    assert "dangling" not in git(work, "fsck", "--full", "--unreachable", "--no-reflogs", "--lost-found")
    assert set(git(work, "reflog", "--format=%H").split()) == {base}
    assert status(work) == "" and git(work, "diff", base) == "" and not (work / "only_fixed.py").exists()
    for fix in fixes.values():
        assert (await Here(work.parent).bash(f"grep -r {fix} {work}")).text == ""
    (work / "m.py").write_text("x = 3\n")
    assert "-x = 1\n+x = 3" in git(work, "diff", base)


async def test_doing_it_again_gives_the_same(work: Path) -> None:
    base, _ = leak(work, FIX)
    (work / "src" / "n.py").write_text("z = 2\n")
    git(work, "checkout", "-q", "--detach", base)
    first = await init(work, base)
    assert first.start != base and status(work) == ""
    assert await init(work, base) == first
    (work / ".git").rename(work / ".git.rollout")  # as if it had been interrupted between the two last steps
    (work / ".git.rollout" / "complete").touch()
    (work / ".git.rollout" / "elsewhere").touch()
    assert await init(work, base) == first and status(work) == "" and not (work / ".git.rollout").exists()
    (work / ".git.rollout").mkdir()  # or before
    assert await init(work, base) == first and not (work / ".git.rollout").exists()


async def test_what_the_image_changed_is_where_the_policy_starts(work: Path) -> None:
    base = base_of(work)
    (work / "m.py").write_text("x = 'as the build needs it'\n")
    (work / "src" / "n.py").unlink()
    ready = await init(work, base)
    assert ready.history == 2 and status(work) == "" and not (work / "src" / "n.py").exists()
    assert git(work, "log", "-1", "--format=%s %an") == "What this environment changed environment"
    (work / "m.py").write_text("x = 3\n")
    taken = await take(Here(work.parent), str(work), ready.start, ready.git)  # type: ignore[arg-type]
    assert b"-x = 'as the build needs it'\n+x = 3\n" in taken.data and taken.files == ("m.py",)


async def test_the_commit_that_swebench_puts_on_top_is_kept(work: Path) -> None:
    base = base_of(work)
    (work / "tox.ini").write_text("[tox]\n")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "SWE-bench")
    top = git(work, "rev-parse", "HEAD")
    assert (await init(work, base)).start == top and (work / "tox.ini").exists()
    git(work, "commit", "-q", "--amend", "--allow-empty", "-m", "The fix")
    assert (await init(work, base)).start == base and not (work / "tox.ini").exists()


async def test_untracked_files_stay_and_are_no_change_of_the_policys(work: Path) -> None:
    base = base_of(work)
    odd = ["a b ", "[x]*?.py", "q\\'\"", "#x", "!y", "new\nline", "\udcff"]
    for name in ["src/p.egg-info/PKG-INFO", *odd]:
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("built\n")
    ready = await init(work, base)
    assert status(work) == "" and all((work / name).exists() for name in odd)
    (work / "src" / "p.egg-info" / "new").write_text("1\n")
    (work / "x.py").write_text("1\n")
    (work / "a b ").write_text("changed\n")
    taken = await take(Here(work.parent), str(work), ready.start, ready.git)  # type: ignore[arg-type]
    assert taken.files == ("src/p.egg-info/new", "x.py")


async def test_very_many_untracked_files_are_told_by_folder(work: Path) -> None:
    base = base_of(work)
    (work / "lib").mkdir()
    for number in range(2100):
        (work / "lib" / str(number)).touch()
    await init(work, base)
    assert status(work) == "" and (work / ".git" / "info" / "exclude").read_text() == "/lib/\n"


async def test_a_submodule_keeps_its_files_and_loses_its_history(work: Path, home: Path) -> None:
    sub = home / "sub"
    sub.mkdir()
    (sub / "s.py").write_text("s = 1\n")
    commit = base_of(sub)
    git(work, "init", "-q", "-b", "main")
    git(work, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(sub), "vendor/sub")
    base = base_of(work)
    ready = await init(work, base)
    assert status(work) == "" and (work / "vendor/sub/s.py").exists() and not (work / "vendor/sub/.git").exists()
    assert not known(work / "vendor/sub", commit) and not (work / ".git/modules").exists()
    (work / "vendor/sub/s.py").write_text("s = 2\n")
    (work / "m.py").write_text("x = 2\n")
    taken = await take(Here(home), str(work), ready.start, ready.git)  # type: ignore[arg-type]
    assert taken.files == ("m.py",)


@pytest.mark.parametrize("smudged", [False, True])
async def test_lfs_files_are_what_lies_there(work: Path, smudged: bool) -> None:
    (work / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (work / "w.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    base = base_of(work)
    git(work, "config", "filter.lfs.required", "true")
    git(work, "config", "filter.lfs.smudge", "false")
    git(work, "config", "filter.lfs.clean", "false")
    if smudged:
        (work / "w.bin").write_bytes(b"the \0 content")
    ready = await init(work, base)
    assert status(work) == "" and ready.history == (2 if smudged else 1)


async def test_a_shallow_repository_stays_one(work: Path, home: Path) -> None:
    base, _ = leak(work, FIX)
    git(work, "branch", "-f", "old", base)
    clone = home / "clone"
    git(home, "clone", "-q", "--depth", "1", "--branch", "old", f"file://{work}", str(clone))
    ready = await init(clone, base)
    assert ready.history == 1 and status(clone) == "" and git(clone, "fsck") == ""
    with pytest.raises(TaskError, match=r"has no commit 1234567 \(its HEAD is [0-9a-f]{40}; it is a shallow one\)"):
        await init(clone, "1234567")


async def test_objects_that_lie_elsewhere_are_gone_too(work: Path, home: Path) -> None:
    base, fixes = leak(work, FIX)
    git(work, "worktree", "add", "-q", "--detach", str(home / "tree"), base)
    git(home, "clone", "-q", "--shared", str(work), str(home / "shared"))
    await init(home / "shared", base)
    assert not known(home / "shared", fixes["head"]) and not list((work / ".git" / "objects").glob("pack/*"))
    assert status(home / "shared") == ""


async def test_a_linked_worktree_becomes_a_repository(work: Path, home: Path) -> None:
    base, fixes = leak(work, FIX)
    git(work, "worktree", "add", "-q", "--detach", str(home / "tree"), base)
    await init(home / "tree", base)
    assert (home / "tree" / ".git").is_dir() and status(home / "tree") == ""
    assert not (work / ".git").exists() and not known(home / "tree", fixes["head"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
async def test_a_folder_of_somebody_elses_works_for_the_policy(work: Path) -> None:
    base = base_of(work)
    await Here(work.parent).bash(f"chown -R 12345 {work}")
    assert (work / ".git" / "HEAD").stat().st_uid == 12345
    ready = await init(work, base)
    said = await Here(work.parent).bash(f"cd {work} && git status --porcelain && git log --format=%H")
    assert (said.exit_code, said.text) == (0, f"{base}\n")
    (work / "m.py").write_text("x = 2\n")
    taken = await take(Here(work.parent), str(work), ready.start, ready.git)  # type: ignore[arg-type]
    assert taken.files == ("m.py",)


async def test_odd_states_of_the_images_repository_do_no_harm(work: Path) -> None:
    base, _ = leak(work, FIX)
    hook = work / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {work}/hooked\n")
    hook.chmod(0o755)
    for name in ("index.lock", "MERGE_HEAD", "shallow.lock"):
        (work / ".git" / name).touch()
    (work / ".git" / "rebase-merge").mkdir()
    git(work, "config", "core.fsmonitor", f"touch {work}/watched")
    git(work, "config", "core.autocrlf", "true")
    git(work, "config", "alias.status", "log")
    (work / "src" / "n.py").write_bytes(b"z = 1\r\n")
    await init(work, base)
    assert sorted(item.name for item in work.iterdir()) == [".git", "m.py", "src"] and status(work) == ""
    assert (work / "src" / "n.py").read_bytes() == b"z = 1\n", "HEAD was another commit: the base is checked out"
    assert not (work / ".git" / "rebase-merge").exists() and not (work / ".git" / "hooks").exists()


async def test_sha256(work: Path) -> None:
    git(work, "init", "-q", "-b", "main", "--object-format=sha256")
    base = base_of(work)
    (work / "m.py").write_text("x = 2\n")
    ready = await init(work, base)
    assert len(ready.start) == 64 and status(work) == ""
    (work / "m.py").write_text("x = 3\n")
    taken = await take(Here(work.parent), str(work), ready.start, ready.git)  # type: ignore[arg-type]
    assert taken.files == ("m.py",)


async def test_a_task_that_is_wrong_says_what(work: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match=f"t__t-1: there is no git repository at {work} "):
        await init(work, "a" * 40)
    base = base_of(work)
    with pytest.raises(TaskError, match=f"the repository at {work} has no commit aaaaaaa.*its HEAD is {base}"):
        await init(work, "a" * 40)
    with pytest.raises(TaskError, match="the image has no folder .*/nowhere"):
        await init(home / "nowhere", base)
    (work / ".git" / "HEAD").write_text("nonsense")
    with pytest.raises(TaskError, match="the git repository at .* is broken"):
        await init(work, base)
    tools = home / "bin"
    tools.mkdir()
    for name in ("bash", "grep"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(TaskError, match="the image has no git"):
        await init(work, base)


async def test_what_the_machine_did_not_do_is_tried_again(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(work)

    async def late(self: Here, command: str, timeout: float | None = None) -> Output:
        return Output("", None, timed_out=True)

    monkeypatch.setattr(Here, "bash", late)
    with pytest.raises(SandboxError, match="not prepared within sandbox.command_timeout: raise it"):
        await init(work, base)


@pytest.mark.slow
async def test_a_large_repository_is_ready_in_seconds(work: Path) -> None:
    """20,000 objects: 5,000 commits, each with a new file."""
    git(work, "init", "-q", "-b", "main")
    stream = []
    for number in range(5000):
        text = f"value = {number}\n" * 20
        stream.append(
            f"commit refs/heads/main\ncommitter a <b> {10**9 + number} +0000\ndata 1\nx"
            f"\nM 644 inline d{number % 50}/f{number}.py\ndata {len(text)}\n{text}\n"
        )
    git(work, "fast-import", "--quiet", feed="".join(stream))
    git(work, "checkout", "-q", "-f", "main")
    base = git(work, "rev-parse", "main~5")
    assert int(git(work, "count-objects", "-v").split("in-pack: ")[1].split()[0]) >= 20_000
    began = time.monotonic()
    ready = await init(work, base)
    prepared = time.monotonic()
    (work / "d1" / "f1.py").write_text("x = 2\n")
    taken = await take(Here(work.parent), str(work), ready.start, ready.git)  # type: ignore[arg-type]
    assert ready.history == 4995 and taken.files == ("d1/f1.py",)
    assert prepared - began < 15 and time.monotonic() - prepared < 15
