"""The policy's patch: every change that git can say, exact bytes, whatever the policy did to git meanwhile (H24)."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from handlers.swe import patch as patches
from handlers.swe.patch import Patch, take
from handlers.swe.repository import Prepared, prepare
from handlers.swe.task import SweTask
from pipeline.interfaces import Output
from tests.boxes import Site, image_cache, short_root, site
from tests.services import require
from tests.sessions import make
from tests.swe_task import git

__all__ = ["image_cache", "short_root", "site"]

GIT = shutil.which("git") or "/usr/bin/git"
FILES = {
    "k.txt": b"a\nb\nc\n",
    "crlf.txt": b"one\r\ntwo  \r\n",
    "bare": b"no newline at the end",
    "bin.dat": bytes(range(256)) * 4,
    "src/m.py": b"x = 1\n",
    "src/gone.py": b"y = 1\n",
    ".gitignore": b"*.log\n",
    ".gitattributes": b"*.txt text eol=lf\n*.dat filter=evil diff=evil\n* ident\n",
}


class Here:
    """A sandbox that is none: real bash and git in a home of its own on this machine, for what needs no isolation."""

    def __init__(self, home: Path) -> None:
        self.home = home

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        return await asyncio.to_thread(self._bash, command)

    def _bash(self, command: str) -> Output:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.home)}
        done = subprocess.run(["bash", "-c", command], cwd=self.home, env=env, capture_output=True, timeout=60)
        return Output((done.stdout + done.stderr).decode("utf-8", "replace"), done.returncode)

    async def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        data = Path(path).read_bytes()[start:]
        return data if size is None else data[:size]


class Bench:
    """A repository as INIT leaves it at `work`, and a copy of its base at `base`."""

    def __init__(self, home: Path, files: dict[str, bytes] = FILES) -> None:
        self.work, self.base, self.sandbox = home / "work", home / "base", Here(home)
        for name, data in files.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_bytes(data)
        git(self.work, "init", "-q")
        git(self.work, "add", "-A")
        git(self.work, "commit", "-q", "--allow-empty", "-m", "base")
        self.task = task_of(str(self.work), git(self.work, "rev-parse", "HEAD"))
        self.ready = Prepared("", "", 0)

    async def init(self) -> Bench:
        self.ready = await prepare(self.sandbox, self.task)  # type: ignore[arg-type]
        shutil.copytree(self.work, self.base, symlinks=True)
        return self

    def sh(self, script: str) -> None:
        subprocess.run(["bash", "-ec", script], cwd=self.work, check=True, capture_output=True, env=_plain())

    async def take(self) -> Patch:
        return await take(self.sandbox, str(self.work), self.ready.start, self.ready.git)  # type: ignore[arg-type]

    def applied(self, data: bytes) -> dict[str, tuple[int, bytes]]:
        """The base's tree after the patch. Fails where it does not apply."""
        done = subprocess.run(
            [GIT, "apply", "--whitespace=nowarn", "-"], cwd=self.base, input=data, capture_output=True
        )
        assert done.returncode == 0 or not data, done.stderr
        return tree(self.base)


def _plain() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}


def task_of(workdir: str, commit: str) -> SweTask:
    about = {"instance_id": "t__t-1", "problem_statement": "x", "FAIL_TO_PASS": []}
    return SweTask.model_validate({**about, "workdir": workdir, "base_commit": commit})


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> kind and right to run (as git has them), and content or a link's aim."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name.split("/")[0] == ".git":
            continue
        if path.is_symlink():
            found[name] = 2, os.fsencode(os.readlink(path))
        elif path.is_file():
            found[name] = int(bool(path.stat().st_mode & 0o100)), path.read_bytes()
    return found


def packed(folder: Path) -> bytes:
    """A folder's content as a tar archive."""
    return subprocess.run(["tar", "-C", str(folder), "-cf", "-", "."], capture_output=True, check=True).stdout


@pytest.fixture
def home() -> Iterator[Path]:
    require("git")
    with tempfile.TemporaryDirectory(prefix="swe-") as folder:
        yield Path(folder)


CHANGES = {
    "a line at the end": "echo d >> k.txt",
    "trailing blanks and CRLF": "printf 'x  \\r\\nthree\\r\\n' >> crlf.txt; printf '  \\n' >> k.txt",
    "no last newline": "printf more >> bare; printf z > new; printf 'a\\nb\\nc' > k.txt",
    "binary": "head -c 3000 /dev/urandom > bin.dat; printf '\\0\\1' > new.bin",
    "an empty file": ": > src/__init__.py; : > k.txt",
    "a mode": "chmod +x src/m.py",
    "deleted": "rm src/gone.py; git rm -q k.txt",
    "renamed": "git mv src/m.py src/n.py",
    "a symbolic link": "ln -s src/m.py link; rm bare; ln -s nowhere bare",
    "a file for a folder": "rm -r src; echo x > src",
    "a folder for a file": "rm k.txt; mkdir k.txt; echo x > k.txt/in",
    "odd names": "echo 1 > 'a b'; echo 1 > $'q\"\\'$x'; echo 1 > $'\\377\\001'; echo 1 > 'ä→'; echo 1 > ' b/c ' || :",
    "a newline in a name": "echo 1 > $'new\\nline'",
    "staged": "echo d >> k.txt; git add k.txt",
    "committed": "echo d >> k.txt; git checkout -qb mine; git -c user.name=a -c user.email=b commit -qam x",
    "committed and amended": "echo d > n; git add n; git commit -qm x; echo e > n; git commit -qa --amend -m y",
    "added though ignored": "echo 1 > forced.log; git add -f forced.log",
    "taken from the index only": "git rm -q --cached k.txt; echo d >> k.txt",
    "the index removed": "echo d >> k.txt; rm .git/index",
    "the index broken": "echo d >> k.txt; echo nonsense > .git/index",
    "assumed unchanged": "git update-index --assume-unchanged k.txt; git update-index --skip-worktree bare; "
    "echo d >> k.txt; echo e >> bare",
    "settings": "echo d >> k.txt; git config diff.noprefix true; git config diff.external /bin/false; "
    "git config core.hooksPath /tmp; git config core.fileMode false; git config color.ui always; "
    "git config filter.evil.clean 'echo evil'; git config diff.evil.textconv 'echo evil'; echo 1 >> bin.dat; "
    "git config alias.diff '!false'; git config core.quotePath false; git config diff.renames copies; "
    "git config core.worktree /; git config core.fsmonitor 'touch /tmp/x'; chmod +x bare",
    "settings that git can't read": "echo d >> k.txt; echo '[broken' >> .git/config",
    "attributes": "echo '* text eol=crlf filter=evil -diff binary' > .gitattributes; printf 'a\\r\\n' > k.txt; "
    "echo '*.py export-ignore working-tree-encoding=UTF-16' >> .git/info/attributes; echo 2 >> src/m.py",
    "refs removed": "echo d >> k.txt; rm -rf .git/refs .git/HEAD .git/logs",
    "a merge in progress": "echo d >> k.txt; touch .git/MERGE_HEAD .git/index.lock",
    "an orphan": "git checkout -q --orphan o; git reset -q; echo d >> k.txt",
}


@pytest.mark.parametrize("name", CHANGES)
async def test_h24_the_patch_makes_the_same_tree(home: Path, name: str) -> None:
    bench = await Bench(home).init()
    bench.sh(f"{{ {CHANGES[name]}; }} ")
    taken = await bench.take()
    assert taken.why == "" and taken.data.endswith(b"\n"), taken
    assert bench.applied(taken.data) == tree(bench.work)


async def test_what_counts_is_what_lies_in_the_folder(home: Path) -> None:
    bench = await Bench(home).init()
    assert await bench.take() == Patch(b"")
    bench.sh("echo d >> k.txt; git checkout -qb mine; git commit -qam x; git checkout -q main; echo 1 > x.log")
    assert await bench.take() == Patch(b""), "a commit on a branch that is not checked out, and an ignored file"
    bench.sh("git checkout -q mine; echo '[metadata]' > setup.cfg; mkdir web; echo '{}' > web/package.json")
    taken = await bench.take()
    assert taken.files == ("k.txt", "setup.cfg", "web/package.json") and b"k.txt" not in taken.whole
    assert b"+[metadata]" in taken.whole and b"web/package.json" in taken.whole


async def test_a_repository_within_is_not_in_the_patch(home: Path) -> None:
    bench = await Bench(home).init()
    bench.sh("git init -q vendor/x; echo 1 > vendor/x/f; git init -q empty; echo d >> k.txt")
    bench.sh(
        "git init -q src; echo 2 > src/m.py; cd vendor/x; git add f; git -c user.name=a -c user.email=b commit -qm x"
    )
    taken = await bench.take()
    assert taken.files == ("k.txt", "src/m.py") and set(taken.nested) == {"empty/", "vendor/x/"}


BROKEN = {
    "rm -rf .git": "the repository's .git is gone",
    "rm -rf .git; git init -q; git add -A; git -c user.name=a -c user.email=b commit -qm x": "does not have the commit",
    "rm -rf .git/objects/pack": "can't be read any more: fatal: unable to read tree",
    "for f in .git/objects/pack/*; do chmod +w $f; echo x > $f; done": "can't be read any more: error: ",
    "rm -rf .git; echo 'gitdir: /nowhere' > .git": "the repository's .git is gone",
    "rm -rf ../work": "the folder .* is gone",
    "head -c 5000000 /dev/urandom > big": r"the patch has \d+ bytes, more than the 4194304 that are taken",
}


@pytest.mark.parametrize("script", BROKEN)
async def test_what_the_policy_broke_is_an_empty_patch_with_a_sentence(home: Path, script: str) -> None:
    bench = await Bench(home).init()
    bench.sh(f"echo d >> k.txt; {script}")
    taken = await bench.take()
    with pytest.raises(ValueError, match=BROKEN[script]):
        raise ValueError(taken.why)
    assert taken.data == b"" and "\n" not in taken.why


def content() -> st.SearchStrategy[bytes]:
    lines = st.lists(
        st.sampled_from([b"a\n", b"b \n", b"\r\n", b"\n", b"c", b"\xff\n", b"-- x\n", b"\0\n"]), max_size=6
    )
    return lines.map(b"".join) | st.binary(max_size=40)


PATHS = ("a", "b c", "d/e", "d/f/g", "\u00e9", "q\"'", "d/--x")


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, str, bytes]]:
    kinds = st.sampled_from(["write", "write", "remove", "mode", "link", "stage", "commit"])
    return draw(st.lists(st.tuples(kinds, st.sampled_from(PATHS), content()), max_size=6))


def edit(folder: Path, kind: str, name: str, data: bytes) -> None:
    path = folder / name
    if kind in ("write", "link"):
        for above in [*path.parents][::-1]:
            if above.is_relative_to(folder) and above != folder and (above.is_symlink() or above.is_file()):
                above.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        if kind == "link":
            path.unlink(missing_ok=True)
            path.symlink_to(os.fsdecode(data.replace(b"\0", b"") or b"x")[:30])
        else:
            if path.is_symlink():
                path.unlink()
            path.write_bytes(data)
    elif kind == "remove" and (path.is_file() or path.is_symlink()):
        path.unlink()
    elif kind == "mode" and path.is_file() and not path.is_symlink():
        path.chmod(path.stat().st_mode ^ 0o111)
    elif kind == "stage":
        git(folder, "add", "-A")
    elif kind == "commit":
        git(folder, "commit", "-qa", "--allow-empty", "-m", "x")


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(PATHS), content(), max_size=5), edits())
async def test_any_edit_of_any_tree_comes_back(files: dict[str, bytes], wanted: list[tuple[str, str, bytes]]) -> None:
    require("git")
    with tempfile.TemporaryDirectory(prefix="swe-") as folder:
        bench = await Bench(Path(folder), {name: files[name] for name in sorted(files)} or {"z": b""}).init()
        for each in wanted:
            edit(bench.work, *each)
        taken = await bench.take()
        assert taken.why == "", taken
        assert bench.applied(taken.data) == tree(bench.work)


HOSTILE = {
    "functions": "git() { echo evil; }; bash() { echo evil; }; exit() { echo no; }; builtin() { :; }; "
    "command() { :; }; exec() { :; }; export -f git bash",
    "an alias": "alias bash='echo evil' exit='echo no' git=false",
    "variables": "export GIT_DIR=/nowhere GIT_INDEX_FILE=/x GIT_EXTERNAL_DIFF=false GIT_CONFIG_COUNT=1 "
    "GIT_CONFIG_KEY_0=core.bare GIT_CONFIG_VALUE_0=true BASH_ENV=/nowhere PATH=/evil LANG=xx IFS=x",
    "a trap": "trap 'sleep 7' EXIT; set -e; set -u",
    "another git first": "mkdir -p ~/bin; printf '#!/bin/sh\\necho evil\\n' > ~/bin/git; chmod +x ~/bin/git; "
    "export PATH=~/bin:$PATH",
    "a full screen": "exec 2>/dev/null; yes | head -c 500000",
}


async def test_what_the_policy_did_to_its_shell_has_no_say(site: Site, home: Path) -> None:
    bench = Bench(home)
    archive = packed(bench.work)
    session, box = await make(site, "bubblewrap")
    await session.start()
    await session.upload("work", archive)
    place = f"{box.home}/work"
    ready = await prepare(session, task_of(place, bench.task.base_commit))
    await session.bash(f"cd {shlex.quote(place)}; echo d >> k.txt")
    for name, script in HOSTILE.items():
        await session.bash(script, 5)
        taken = await take(session, place, ready.start, ready.git)
        assert taken.files == ("k.txt",) and taken.data.endswith(b" c\n+d\n"), (name, taken)
    await session.close()


async def test_a_policy_that_hangs_git_ends_with_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = await Bench(home).init()
    bench.sh("echo d >> k.txt")

    async def late(command: str, timeout: float | None = None) -> Output:
        return Output("[timed out after 120 s]", None, timed_out=True)

    monkeypatch.setattr(bench.sandbox, "bash", late)
    assert (await bench.take()).why == "the patch could not be taken in time: the folder holds too much"
    monkeypatch.undo()
    monkeypatch.setattr(patches, "MOST", 10)
    assert "more than the 10 that are taken" in (await bench.take()).why
