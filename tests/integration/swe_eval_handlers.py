"""A tiny repository whose tests are a shell script, and a handler that evaluates a given patch of it: for tests of what
does not depend on pytest, in any sandbox. Its runner prints what `go test -v` does.
"""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from handlers.swe import Swe, SweTask
from handlers.swe.evaluate import evaluate
from pipeline.interfaces import Context, Reward

WORKDIR = "/tmp/repo"
PRODUCT = "value() { echo 1; }\nother() { echo 3; }\n"
FIXED = PRODUCT.replace("echo 1", "echo 2")
RUNNER = """\
. ./product.sh
bad=0
check() {
    echo "=== RUN   $1"
    if [ "$2" = "$3" ]; then echo "--- PASS: $1 (0.00s)"; else echo "--- FAIL: $1 (0.00s)"; bad=1; fi
}
check TestOther "$(other)" 3
check TestValue "$(value)" 2
exit $bad
"""
MAKE = f"""\
set -e
mkdir -p {WORKDIR}; cd {WORKDIR}
printf '%s' '{PRODUCT}' > product.sh
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
export GIT_AUTHOR_DATE=2024-01-01T00:00:00Z GIT_COMMITTER_DATE=2024-01-01T00:00:00Z
git init -q -b main .; git add product.sh; git commit -q -m base
"""
"""Makes the repository; its commit is the same wherever it is made."""

BASE = "2c03ca254e2b537061141dc530a6adf89713939a"


def diff(path: str, before: str, after: str) -> str:
    """A git diff of one text file; `before` is empty for a new one."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{path}" if before else "/dev/null",
        f"b/{path}",
    )
    new = "" if before else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{new}{''.join(lines)}"


def product(text: str) -> bytes:
    """The patch after which product.sh says `text`."""
    return diff("product.sh", PRODUCT, text).encode()


ROW: dict[str, Any] = {
    "instance_id": "mini-1", "base_commit": BASE, "problem_statement": "The value should be 2.", "workdir": WORKDIR,
    "patch": diff("product.sh", PRODUCT, FIXED), "test_patch": diff("run.sh", "", RUNNER), "prelude": ":",
    "test_command": "bash run.sh", "log_parser": "parse_log_gotest", "FAIL_TO_PASS": ["TestValue"],
    "PASS_TO_PASS": ["TestOther"],
}  # fmt: skip


class Given(Swe):
    """Evaluates `given`, a patch of the tiny repository, in a sandbox without an image."""

    class Task(SweTask):
        given: str

    tools = ()
    eval_sandbox = "only"
    resumable: ClassVar[bool] = True

    def sandbox_for(self, task: Any) -> dict[str, Any]:
        return {}

    async def init(self, ctx: Context) -> None:
        pass

    async def run(self, ctx: Context) -> None:
        ctx.state["patch"] = ctx.task.given.encode()

    async def eval(self, ctx: Context) -> Reward:
        assert ctx.sandbox is not None
        made = await ctx.sandbox.bash(f"({MAKE})")
        assert made.exit_code == 0, made
        return await evaluate(ctx)
