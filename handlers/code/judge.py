"""Lets the runner test a program in a sandbox, follows its records, and makes the reward of them.

The runner works in the background and is looked at in short commands, so no limit of one command is met, however many
tests there are. Records are compared as they come: the first failed test ends it, unless the reward is the share.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handlers.code.records import LONGEST, SHOWN, cut, graded, how_it_ended, packed
from handlers.code.task import CodeTask
from pipeline.errors import EvaluationTimeout, GraderError
from pipeline.interfaces import Context, Reward, Sandbox

FOLDER = ".judge"
CHUNK = 8 << 20
"""Bytes of records that are read at once; more where one record is longer."""

SLACK = 60.0
"""Seconds beyond a test's own limit without a record, after which the runner is taken for broken."""

COMPILE = 70.0
"""Seconds that the compiler may take, a little more than the runner allows."""

SHARE = 0.9
"""Of the stage's working time, what the tests may take; the rest is for making the sandbox and comparing."""

TIMES = 10
"""In one command the shell looks so often whether the runner has ended; a pause is 0.02 s at first, 0.08 s later."""

START = f"""(cd ~/{FOLDER} || exit 1
command -v python3 >/dev/null || exit 127
python3 -I runner.py check job results 2>&1 || exit 1
python3 -I runner.py run job results >/dev/null 2>&1 </dev/null &
echo "pid $!")"""

LOOK = """n=0; while kill -0 {pid} 2>/dev/null && [ $n -lt {times} ]; do sleep {pause}; n=$((n+1)); done
if read -r line 2>/dev/null </proc/{pid}/stat; then set -- ${{line##*)}}; echo "state $1"; else echo "state gone"; fi"""

BLAME = {
    "gone": "the program ended the process that tests it",
    "stopped": "the program stopped the process that tests it",
    "forged": "the program wrote into the results",
    "spoilt": "the program before it left a sandbox in which no further test can begin",
}


@dataclass
class Count:
    """What is known so far. `end` is why there is nothing more to come, `told` the record that says so."""

    tests: int
    ran: int = 0
    passed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    failed: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    told: dict[str, Any] = field(default_factory=dict)

    def take(self, said: dict[str, Any]) -> None:
        kind = said["kind"]
        if kind == "test":
            self.ran += 1
            self.passed += said["passed"]
            self.seconds += said["seconds"]
            self.slowest = max(self.slowest, said["cpu"])
            if not said["passed"] and not self.failed:
                self.failed = {"number": self.ran, **said}
        elif kind == "end":
            self.end = self.end or said["why"]
        else:
            self.end, self.told = kind, said

    def evidence(self, why: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"why": why, "tests": self.tests, "ran": self.ran, "passed": self.passed}
        facts |= {"seconds": round(self.seconds, 3), "slowest_cpu": self.slowest}
        if self.failed:
            shown = ("number", "why", "input", "expected", "got")
            facts["failing"] = {name: self.failed[name] for name in shown}
            facts["stderr"] = self.failed["stderr"]
        return facts


async def judge(ctx: Context, program: str) -> Reward:
    """Score a program. Raises GraderError, EvaluationTimeout with the counts in its evidence, TaskError."""
    task: CodeTask = ctx.task
    sandbox = ctx.sandbox
    if sandbox is None:
        raise GraderError("there is no sandbox to test the program in")
    secret = secrets.token_hex(32)
    total = ctx.deadline * SHARE if ctx.deadline else None
    made = await ctx.compute(packed, task.model_dump(), program, secret, total)
    pid = await _start(sandbox, made["job"])
    count = Count(len(made["tests"]))
    await _follow(ctx, sandbox, pid, secret, made["tests"], count)
    return _scored(task, count, made["tests"])


async def _start(sandbox: Sandbox, job: bytes) -> int:
    try:
        await sandbox.write(f"{FOLDER}/runner.py", Path(__file__).with_name("runner.py").read_bytes())
        await sandbox.write(f"{FOLDER}/job", job)
    except (OSError, ValueError) as error:
        raise GraderError(f"the tests can't be put into the sandbox: {error}") from error
    output = await sandbox.bash(START)
    if output.exit_code == 127:
        raise GraderError("there is no python3 in the sandbox, which the tests are run with: choose another `image`")
    words = output.text.rpartition("pid ")[2].split()
    if output.exit_code != 0 or not words or not words[0].isdigit():
        raise GraderError(f"the tests can't be run in this sandbox: {output.text[-1000:]}")
    return int(words[0])


async def _follow(ctx: Context, sandbox: Sandbox, pid: int, secret: str, tests: list[list[Any]], count: Count) -> None:
    """Read and grade records until the last one, or the first that decides."""
    task: CodeTask = ctx.task
    offset, number, most = 0, 0, CHUNK
    patience, heard, pause = 2 * task.time_limit + 1 + SLACK, time.monotonic(), 0.02
    while not count.end:
        look = await sandbox.bash(LOOK.format(pid=pid, times=TIMES, pause=pause))
        state = look.text.rpartition("state ")[2].strip()
        pause = min(0.08, pause + 0.02)
        data = await _read(sandbox, offset, most)
        records, size = cut(data)
        said = await ctx.compute(
            graded, records, secret, number, tests[count.ran : count.ran + len(records)], task.checker, task.tolerance
        ) if records else []  # fmt: skip
        offset, number = offset + size, number + len(records)
        for item in said:
            count.take(item)
            if count.failed and not task.partial:
                return
        if records:
            heard, most = time.monotonic(), CHUNK
        elif len(data) == most < LONGEST:
            most = LONGEST
        elif state in ("gone", "Z", "X"):
            count.end = "gone"
        elif state in ("T", "t"):
            count.end = "stopped"
        elif time.monotonic() - heard > patience + (COMPILE if not count.ran else 0):
            raise GraderError(
                f"the tests did not go on in the sandbox: no result for {patience:.0f} s, state {state!r}"
            )


async def _read(sandbox: Sandbox, offset: int, size: int) -> bytes:
    try:
        return await sandbox.read(f"{FOLDER}/results", offset, size)
    except OSError:  # a program may have made anything of it; the runner writes it anew
        return b""


def _scored(task: CodeTask, count: Count, tests: list[list[Any]]) -> Reward:
    if count.end == "broken":
        raise GraderError(f"the tests can't be run in this sandbox: {count.told['why']}")
    share = count.passed / count.tests
    right = count.passed == count.tests
    why = "passed all tests"
    if count.end == "time":
        ran = f"{count.ran} of {count.tests} tests had run, {count.passed} passed"
        raise EvaluationTimeout(f"the tests took longer than the stage allows: {ran}", count.evidence(ran))
    if count.end == "unbuilt":
        why = f"it does not compile: {how_it_ended(count.told)}"
    elif count.end in BLAME:
        at = min(count.ran, count.tests - 1)
        why = f"test {at + 1} of {count.tests}: {BLAME[count.end]}"
        _, given, rights = tests[at]
        shown = {"input": given[:SHOWN], "expected": rights[0][:SHOWN], "got": "", "stderr": ""}
        count.failed = count.failed or {"number": at + 1, "why": BLAME[count.end], **shown}
        right = False
    elif count.failed:
        why = f"test {count.failed['number']} of {count.tests}: {count.failed['why']}"
    evidence = count.evidence(why)
    if count.end == "unbuilt":
        evidence["stderr"] = count.told["stderr"]
    value = share if task.partial else float(right)
    return Reward(value=value, parts={"correct": float(right), "passed": share}, evidence=evidence)
