"""One run of the hidden tests in a sandbox: the patches are applied, the runner is started apart from everything else,
what it left behind is killed, and its log, its report and the test files are read from outside.
"""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import shlex
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from handlers.swe.task import SweTask, prelude_of, present_test_files, test_command_of
from pipeline.errors import GraderError, TaskError
from pipeline.interfaces import Sandbox

HERE = Path(__file__).parent
MB = 1 << 20

LOG_BYTES = 10 * MB
"""Kept of a long log's beginning, and of its end."""

REPORT_BYTES = 32 * MB
CHUNK = 8 * MB

LOOK_SECONDS = 20.0
"""One command waits so long for the runner, or as long as `sandbox.command_timeout` lets it."""

LATE_SECONDS = 30.0
"""A shell that does not answer for so long after that is taken for lost."""

_PLACE = """
cd -- "$1" || { echo "no folder $1"; exit 3; }
G=(git -c core.hooksPath=/dev/null -c core.fsmonitor=false)
apply() { [ ! -s "$1" ] || "${G[@]}" apply --binary --whitespace=nowarn "$1"; }
others() { "${G[@]}" ls-files -o -z | sort -z; }
if [ "$3" = first ]; then
    others > "$2/../.rollout-others" || exit 3
else # of the run before, nothing may be seen: its patch may have been the right one
    for before in "$2"/../.tests-*; do [ "$before" -ef "$2" ] || rm -rf "$before"; done
    { "${G[@]}" reset -q --hard && "${G[@]}" clean -fdq; } || exit 3
    others | comm -z -13 "$2/../.rollout-others" - | xargs -0r rm -f --
    others | grep -z '/__pycache__/[^/]*$' | xargs -0r rm -f --
fi
apply "$2/tests.diff" 2>&1 || exit 4
# What works on pytest already may go on with it: files that use it, or import's machinery, before the patch.
[ ! -e "$2/touched" ] || {
    while IFS= read -r -d '' name; do [ -f "$name" ] || printf '%s\\0' "$name"; done < "$2/touched"
    xargs -0r grep -sLZE '(import|from) +_?pytest|def +pytest_|pluggy|meta_path' -- < "$2/touched"
} | while IFS= read -r -d '' name; do printf '%s\\0' "$PWD/$name"; done > "$2/changed"
apply "$2/patch.diff" 2>&1 || exit 5
"""

# What the shell itself needs no program for is done without one: the policy's code may have replaced those by then.
_END = """
ours=$SANDBOX_ID apart=0
mapfile -d '' -t first < /proc/1/cmdline
case "${first[*]}" in *'echo ready; while read -r'*|appinit*|sinit*) apart=1;; esac
for round in {1..200}; do
    left=0
    for place in /proc/[0-9]*; do
        pid=${place#/proc/}
        case " $rollout_before $$ " in *" $pid "*) continue;; esac
        { read -r -d '' stat < $place/stat; } 2>/dev/null
        case "${stat##*) }" in Z*|X*|'') continue;; esac
        if [ $apart = 0 ]; then
            mapfile -d '' -t has < $place/environ
            case " ${has[*]} " in *" ROLLOUT_RUN=$1 "*) ;; *) continue;; esac
        fi 2>/dev/null
        kill -9 $pid 2>/dev/null && left=1
    done
    [ $left = 1 ] || break
done
"""


_RUN = """\
unset BASH_ENV ENV ROLLOUT_TOOL
cd -- {workdir} || exit 97
{prelude}
set -o pipefail
rollout_tests=$1
{command}
"""
"""What the runner's own bash does; $1 is the run's folder."""

_WITH_PLUGIN = """\
export PYTHONPATH="$rollout_tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTEST_ADDOPTS="-p NAME${PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}"
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left. `exit_code`: None where nobody can say (the shell that waited was killed).

    `changed`: test files that are not what they were before it. `commands`: what was run, for the evidence.
    """

    exit_code: int | None
    timed_out: bool
    seconds: float
    log: bytes
    log_bytes: int
    report: bytes
    key: bytes
    digests: dict[str, str]
    changed: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


class PatchFailed(Exception):
    """The patch does not apply; git's words."""


async def run_tests(
    sandbox: Sandbox,
    task: SweTask,
    patch: bytes,
    *,
    changed: Iterable[str] = (),
    report: bool,
    seconds: float,
    first: bool = True,
) -> Run:
    """Run the hidden tests with `patch` on the prepared repository, for at most `seconds`.

    `changed`: files of the patch that have no business in the tests' own machinery, unless they had it before.
    `report`: pytest runs them, with our plugin. `first`: nothing ran in this sandbox yet; else the repository is put
    back before, and nothing of the run before can be seen. Raises PatchFailed, TaskError where the test patch does not
    apply, SandboxError.
    """
    began = time.monotonic()
    mark = secrets.token_hex(8)
    key = secrets.token_bytes(32)
    folder = f".tests-{mark}"
    await sandbox.upload(folder, _archive(_files(task, patch, changed, mark, key if report else b"")))
    await _place(sandbox, task, folder, first)
    files = present_test_files(task)
    digests = await _digests(sandbox, task.workdir, files)
    stamps = await _stamps(sandbox, task.workdir, files)
    exit_code, timed_out = await _wait(sandbox, folder, mark, seconds)
    counting = f"if [ -f {folder}/log ] && [ ! -L {folder}/log ]; then wc -c < {folder}/log; else echo 0; fi"
    ended = await sandbox.bash(f"set -- {mark}\n{_END}\n{counting}")
    size = int((re.findall(r"\d+", ended.text) or ["0"])[-1])
    log, said, now, then = await asyncio.gather(
        _log(sandbox, f"{folder}/log", size),
        _whole(sandbox, f"{folder}/report", REPORT_BYTES),
        _digests(sandbox, task.workdir, files),
        _stamps(sandbox, task.workdir, files),
    )
    changed = [path for path in files if digests[path] != now[path] or stamps.get(path) != then.get(path)]
    return Run(
        exit_code=exit_code, timed_out=timed_out, seconds=round(time.monotonic() - began, 3), log=log, log_bytes=size,
        report=said, key=key, digests=digests, changed=changed, commands=[test_command_of(task)],
    )  # fmt: skip


def _files(task: SweTask, patch: bytes, changed: Iterable[str], mark: str, key: bytes) -> dict[str, bytes]:
    """What is put into the folder of a run; the plugin where there is a key."""
    files = {"tests.diff": _bytes(task.test_patch), "patch.diff": patch}
    command = test_command_of(task)
    plugin = f"report_{mark}"
    if key:
        site = (HERE / "pytest_site.py").read_text(encoding="utf-8").replace("rollout_plugin_name", plugin)
        files["sitecustomize.py"] = site.encode()
        report = (HERE / "pytest_report.py").read_text(encoding="utf-8")
        files[f"{plugin}.py"] = report.replace("handlers.swe.pytest_watch", f"watch_{mark}").encode()
        files[f"watch_{mark}.py"] = (HERE / "pytest_watch.py").read_bytes()
        files["key"] = key
        files["touched"] = b"".join(_bytes(path) + b"\0" for path in changed)
        command = _WITH_PLUGIN.replace("NAME", plugin) + with_plugin(command, plugin)
    script = _RUN.format(workdir=shlex.quote(task.workdir), prelude=prelude_of(task), command=command)
    return {**files, "run.sh": _bytes(script)}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def with_plugin(command: str, plugin: str) -> str:
    """The command, where it sets a variable that the plugin needs, with both values."""
    command = re.sub(r"(?<![\w-])PYTHONPATH=(?=\S)", 'PYTHONPATH="$rollout_tests":', command)
    return re.sub(r"(?<![\w-])PYTEST_ADDOPTS=(?=\S)", f"PYTEST_ADDOPTS='-p {plugin} '", command)


def _archive(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


async def _place(sandbox: Sandbox, task: SweTask, folder: str, first: bool) -> None:
    order = "first" if first else "again"
    script = f'cd; D=$(pwd -P)/{folder}; (set -- {shlex.quote(task.workdir)} "$D" {order}\n{_PLACE})'
    done = await sandbox.bash(script)
    said = done.text.strip()[-500:]
    if done.exit_code == 4:
        raise TaskError(f"field 'test_patch' of {task.instance_id} does not apply to the base commit: {said}")
    if done.exit_code == 5:
        raise PatchFailed(said)
    if done.exit_code != 0:
        raise GraderError(f"the repository at {task.workdir} can't be made ready for the tests: {said}")


async def _wait(sandbox: Sandbox, folder: str, mark: str, seconds: float) -> tuple[int | None, bool]:
    """Start the runner and wait for its end: its exit code as the shell that waits for it says, and whether it is late.

    It has a session of its own, no terminal, no input, and none of the shell's variables.
    """
    until = time.monotonic() + seconds
    began = await sandbox.bash(
        f"cd; D=$(pwd -P)/{folder}; rollout_before=$(cd /proc && echo [0-9]*)\n"
        f'ROLLOUT_RUN={mark} $(type -P setsid) bash --norc --noprofile "$D/run.sh" "$D" </dev/null >"$D/log" 2>&1 &\n'
        'rollout_run=$!; echo "started=$rollout_run"'
    )
    started = re.search(r"started=(\d+)\s*\Z", began.text)
    if not started:
        raise GraderError(f"the tests could not be started: {began.text[-300:]!r}")
    while True:
        nap = min(LOOK_SECONDS, max(0.1, until - time.monotonic()))
        said = await sandbox.bash(_look(started[1], nap), nap + LATE_SECONDS)
        if found := re.search(r"ended=(\d+)\s*\Z", said.text):
            return int(found[1]), False
        if "running=1" not in said.text and not said.timed_out:
            return None, False
        if time.monotonic() >= until:
            return None, True


def _look(runner: str, seconds: float) -> str:
    """Wait up to so long for the runner; a quick end is seen quickly, and a long run costs few processes.

    The shell that started it may be lost, for what runs inside can stop or kill it: then only whether it runs is known.
    """
    return (
        f"rollout_until=$((SECONDS + {max(1, round(seconds))})); rollout_nap=0.05\n"
        f"while kill -0 {runner} 2>/dev/null && [ $SECONDS -lt $rollout_until ]; do\n"
        "    sleep $rollout_nap; [ $SECONDS -lt 3 ] || rollout_nap=0.25\n"
        "done\n"
        f"if kill -0 {runner} 2>/dev/null; then echo running=1\n"
        f'elif [ "$rollout_run" != {runner} ]; then echo lost=1\n'
        f'else wait {runner}; echo "ended=$?"; fi'
    )


async def _digests(sandbox: Sandbox, workdir: str, files: Iterable[str]) -> dict[str, str]:
    async def digest(path: str) -> str:
        try:
            return sha256(await sandbox.read(f"{workdir}/{path}")).hexdigest()
        except (OSError, ValueError) as error:
            return f"can't be read: {error}"

    names = list(files)
    return dict(zip(names, await asyncio.gather(*map(digest, names)), strict=True))


async def _stamps(sandbox: Sandbox, workdir: str, files: Iterable[str]) -> dict[str, str]:
    """When each file was last changed, by the kernel's clock: it also shows what was changed and put back."""
    names = list(files)
    if not names:
        return {}
    words = " ".join(map(shlex.quote, names))
    done = await sandbox.bash(f"(cd {shlex.quote(workdir)} && LC_ALL=C stat -c '%i %z %s' -- {words}) 2>&1")
    lines = done.text.strip().splitlines()
    return dict(zip(names, lines, strict=True)) if len(lines) == len(names) else {"": done.text}


async def _log(sandbox: Sandbox, path: str, size: int) -> bytes:
    if size <= 2 * LOG_BYTES:
        return await _whole(sandbox, path, 2 * LOG_BYTES)
    head = await _whole(sandbox, path, LOG_BYTES)
    tail = await _whole(sandbox, path, LOG_BYTES, size - LOG_BYTES)
    return head + b"\n[%d bytes left out]\n" % (size - 2 * LOG_BYTES) + tail


async def _whole(sandbox: Sandbox, path: str, most: int, start: int = 0) -> bytes:
    """At most `most` bytes of a file, in parts; nothing where there is none."""
    parts: list[bytes] = []
    got = 0
    while got < most:
        size = min(CHUNK, most - got)
        try:
            part = await sandbox.read(path, start + got, size)
        except OSError:
            break
        parts.append(part)
        got += len(part)
        if len(part) < size:
            break
    return b"".join(parts)
