"""Software engineering tasks: a repository, an issue, and hidden tests that decide (SWE-bench and its kind).

INIT puts the repository at its base commit without the history that shows the fix (`repository`), RUN takes all that
the policy changed as one patch (`patch`, `left_out`), EVAL runs the hidden tests in a sandbox of its own (`evaluate`).
"""

from __future__ import annotations

import shlex
from typing import Any, ClassVar

from handlers.swe.evaluate import evaluate
from handlers.swe.left_out import choose
from handlers.swe.patch import take
from handlers.swe.repository import prepare
from handlers.swe.task import SweTask, fail_to_pass, image_of, log_parser_of, prelude_of, test_command_of, test_files
from handlers.swe.verdict import check_parser
from handlers.tools import Over, tool
from handlers.turns import Turns
from pipeline.errors import ContextFull
from pipeline.interfaces import Context, Message, Reward

__all__ = ["Swe", "SweTask"]

CHOOSE_SECONDS = 60.0

GOLD = "/tmp/gold.patch"
PIECE = 700
"""Characters of the gold patch in one call: a reply's limit (`policy.max_tokens`) may be low."""


class Swe(Turns):
    """1.0 where the hidden tests pass with the policy's patch: all of FAIL_TO_PASS and all of PASS_TO_PASS; else 0.0.

    A task is a row of SWE-bench, SWE-Gym or SWE-rebench as it is (`SweTask` says what a site may add to it), and each
    brings its image, so `sandbox.driver` must be `apptainer`. Where config.yaml says so, try one with its gold patch:

        rollout try swe --data "$(cat row.json)"

    Of the patch is left out, and told in the evidence, what steers the tests rather than the product: see `left_out`.
    """

    Task = SweTask
    sandbox: ClassVar[dict[str, Any] | None] = {}
    eval_sandbox = "fresh"
    tools = ("bash", "ipython", "read_file", "write_file", "edit_file", "submit")
    preload = ("swebench.harness.log_parsers",)

    def sandbox_for(self, task: SweTask) -> dict[str, Any]:
        return {"image": image_of(task), "workdir": task.workdir, "network": task.network, **task.sandbox}

    async def init(self, ctx: Context) -> None:
        check_parser(log_parser_of(ctx.task))
        test_command_of(ctx.task)
        fail_to_pass(ctx.task)
        assert ctx.sandbox is not None
        ready = await prepare(ctx.sandbox, ctx.task)
        ctx.state.update(start=ready.start, git=ready.git)

    def prompt(self, task: SweTask) -> str:
        wanted = f"\n\nThe tests use this interface:\n\n{task.interface.strip()}" if task.interface.strip() else ""
        return (
            f"The repository at {task.workdir} has the problem that the following issue describes. Change its source "
            f"code so that the problem is solved.\n\n<issue>\n{task.problem_statement.strip()}\n</issue>{wanted}\n\n"
            "Hidden tests decide whether it is solved; those that pass now must go on passing. Changes to test files "
            "and to the configuration of the tests are not counted, and neither are files that git ignores. What "
            "counts are the files as they lie in the folder, committed or not: remove what is not part of the "
            "solution, such as scripts that you tried things with. You work alone and nobody answers questions. Look "
            "at the code first, show the problem with a small script, change the code, see that it works, then call "
            "`submit`."
        )

    @tool("Hand in the repository as it is now and end the work. Call it once, when the problem is solved.")
    async def submit(self, ctx: Context) -> str:
        return Over("The repository was handed in.")

    async def run(self, ctx: Context) -> None:
        assert ctx.sandbox is not None
        await ctx.sandbox.bash(f"cd {shlex.quote(ctx.task.workdir)}\n{prelude_of(ctx.task)}")
        try:
            await super().run(ctx)
        except ContextFull:  # what was changed by then counts all the same
            ctx.trajectory.truncated = "context"
        taken = await take(ctx.sandbox, ctx.task.workdir, ctx.state["start"], ctx.state["git"])
        ctx.state.update(patch=b"", left_out=[], patch_why=taken.why)
        known = test_files(ctx.task), ctx.task.patch
        try:
            chosen = await ctx.compute(choose, taken.data, taken.whole, *known, timeout=CHOOSE_SECONDS)
        except TimeoutError:
            ctx.state["patch_why"] = f"the patch could not be read in {CHOOSE_SECONDS:g} s"
        else:
            ctx.state.update(patch=chosen["patch"], left_out=[*chosen["left_out"], *taken.nested])

    async def eval(self, ctx: Context) -> Reward:
        return await evaluate(ctx)

    def gold(self, task: SweTask) -> list[Message] | None:
        """Messages that apply the task's own patch and submit; None where it has none."""
        if not task.patch.strip():
            return None
        pieces = [task.patch[at : at + PIECE] for at in range(0, len(task.patch), PIECE)]
        writing = [f"printf %s {shlex.quote(piece)} {'>>' if at else '>'} {GOLD}" for at, piece in enumerate(pieces)]
        writing.append(f"git -C {shlex.quote(task.workdir)} apply --whitespace=nowarn {GOLD}")
        return [*(_calling("bash", command=command) for command in writing), _calling("submit")]


def _calling(name: str, **arguments: str) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
