"""EVAL of the SWE family: the policy's patch and the hidden tests in a fresh sandbox, and what the run is worth.

A wrong patch is 0.0, whatever it did to the tests. A broken environment is no score: where no listed test passed, the
right patch (the task's own) is run in the same sandbox, and only if tests pass with it was it the policy's patch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from handlers.swe.diff import check, paths_of, split, without
from handlers.swe.left_out import choose
from handlers.swe.repository import prepare
from handlers.swe.task import SweTask, fail_to_pass, log_parser_of, pass_to_pass, test_files
from handlers.swe.test_run import PatchFailed, Run, run_tests
from handlers.swe.verdict import SHOWN, check_parser, is_pytest, judge
from pipeline.errors import EvaluationTimeout, GraderError, TaskError
from pipeline.interfaces import Context, Reward

TAIL = 4000
"""Characters of the log in the evidence, from its end."""

LONGEST = 500
"""Characters of a sentence or a name in the evidence."""

COLOURS = re.compile(r"\x1b\[[0-9;?]*[@-~]|\r(?=\n)")

SPARE = 10.0
"""Seconds of the stage's limit that are kept for what comes after the tests."""

MACHINERY = re.compile(rb"^\+.*(\b(import|from)\s+_?pytest|\bdef\s+pytest_|pluggy|meta_path)", re.MULTILINE)
"""Where the right patch adds such a line, the file is a plugin of pytest's or one of import's."""

JUDGE_SECONDS = 120.0
"""For reading the log and the report; patterns on what a policy wrote may take for ever."""


async def evaluate(ctx: Context) -> Reward:
    """1.0 where all of FAIL_TO_PASS and PASS_TO_PASS pass with `ctx.state["patch"]`, else 0.0.

    `ctx.sandbox` is a fresh one of the task's image. Of the state: `patch` (bytes), `left_out` (paths), `patch_why`.
    Parts: resolved, fail_to_pass and pass_to_pass (shares), patch_applies. Raises EvaluationTimeout, GraderError where
    the tests do not run with the right patch either, TaskError where the task is wrong, SandboxError.
    """
    return await Evaluation(ctx).reward()


class Evaluation:
    """One evaluation; `reward` is called once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._task: SweTask = ctx.task
        self._parser = check_parser(log_parser_of(ctx.task))
        self._began = time.monotonic()
        self._ran = False
        self._limit = 0.0
        self._kept = ""
        self._left_out = [str(path) for path in ctx.state.get("left_out", [])]

    async def reward(self) -> Reward:
        ctx = self._ctx
        why = str(ctx.state.get("patch_why", ""))
        patch = bytes(ctx.state.get("patch", b""))
        if why and not patch:
            return self._zero(f"there is no patch to evaluate: {why}", applies=0.0)
        assert ctx.sandbox is not None, "Swe.eval_sandbox is fresh"
        try:
            chosen = await ctx.compute(
                _evaluated, patch, test_files(self._task), self._task.patch, timeout=JUDGE_SECONDS
            )
        except TimeoutError:
            return self._zero(f"the patch could not be read in {JUDGE_SECONDS:g} s", applies=0.0)
        if chosen["wrong"]:
            return self._zero(f"patch-failed: {chosen['wrong']}", applies=0.0)
        self._left_out = sorted({*self._left_out, *chosen["left_out"]})
        await prepare(ctx.sandbox, self._task)
        if ctx.attempt > 1 and (wrong := await self._control()):  # first, before the patch can break anything
            raise GraderError(wrong)
        try:
            run = await self._run(chosen["patch"], chosen["changed"])
        except PatchFailed as error:
            return self._zero(f"patch-failed: the patch does not apply to the base commit: {error}", applies=0.0)
        kept = ctx.keep("test.log", run.log)
        self._kept = ctx.keep("patch.diff", patch)
        try:
            verdict = await self._judge(run)
        except TimeoutError:
            why = f"what the tests printed could not be read in {JUDGE_SECONDS:g} s"
            if ctx.attempt == 1:
                raise GraderError(why) from None
            return self._zero(f"{why} (with the right patch it can)", applies=1.0)
        if run.timed_out:
            raise self._timeout(run, verdict, kept)
        evidence = self._evidence(run, verdict, kept)
        if not verdict["passed"] and ctx.attempt == 1 and (wrong := await self._control()):
            raise GraderError(f"{wrong}; with the rollout's patch: {verdict['why']}")
        if not verdict["passed"] and not verdict["forged"]:
            evidence["why"] = f"{evidence['why']} (tests do pass with the right patch)"
        if verdict["resolved"] and not chosen["patch"].strip():
            raise TaskError(f"{self._task.instance_id}: its tests pass with nothing changed, so it teaches nothing")
        return Reward(
            value=float(verdict["resolved"]),
            parts={
                "resolved": float(verdict["resolved"]),
                "fail_to_pass": verdict["fail_to_pass"],
                "pass_to_pass": verdict["pass_to_pass"],
                "patch_applies": 1.0,
            },
            evidence=evidence,
        )

    async def _run(self, patch: bytes, changed: Iterable[str] = ()) -> Run:
        assert self._ctx.sandbox is not None
        self._limit = round(self._seconds(), 1)
        run = await run_tests(
            self._ctx.sandbox, self._task, patch,
            changed=changed, report=is_pytest(self._parser), seconds=self._limit, first=not self._ran,
        )  # fmt: skip
        self._ran = True
        return run

    def _seconds(self) -> float:
        """What the tests may take: the task's own limit, and what the stage's leaves."""
        wanted, limit = self._task.test_timeout, self._ctx.deadline
        left = wanted if limit is None else limit - (time.monotonic() - self._began) - SPARE
        return max(1.0, min(wanted, left))

    async def _control(self) -> str:
        """Whether tests pass here at all: why not, or "". Run with the right patch, where the task has it.

        Without one the base commit must have tests that run to a result.
        """
        gold = self._task.patch.encode("utf-8", "surrogateescape")
        try:
            run = await self._run(gold)
        except PatchFailed as error:
            raise TaskError(
                f"field 'patch' of {self._task.instance_id} does not apply to the base commit: {error}"
            ) from None
        try:
            verdict = await self._judge(run)
        except TimeoutError:
            return f"what the tests print with the right patch could not be read in {JUDGE_SECONDS:g} s"
        if run.timed_out:
            return f"the right patch's tests did not end within {self._limit:g} s"
        healthy = verdict["passed"] if gold else verdict["passed"] or verdict["failed"]
        if healthy:
            return ""
        with_what = "with the right patch" if gold else "on the base commit"
        tail = run.log[-600:].decode("utf-8", "replace").strip()
        return f"the environment is broken: {with_what} no test passes either ({verdict['why']}); its log ends: {tail}"

    async def _judge(self, run: Run) -> dict[str, Any]:
        """The verdict on a run. Raises TimeoutError."""
        about = {
            "parser": self._parser, "exit_code": run.exit_code, "report": run.report, "key": run.key,
            "log": b"" if is_pytest(self._parser) else run.log, "digests": run.digests, "changed": run.changed,
            "fail_to_pass": fail_to_pass(self._task), "pass_to_pass": pass_to_pass(self._task),
        }  # fmt: skip
        verdict: dict[str, Any] = await self._ctx.compute(judge, about, timeout=JUDGE_SECONDS)
        return verdict

    def _timeout(self, run: Run, verdict: dict[str, Any], kept: str) -> EvaluationTimeout:
        where = f", in {verdict['last']}" if verdict["last"] else ""
        where = _plain(where, LONGEST)
        sentence = f"the tests did not end within {self._limit:g} s{where}"
        evidence = self._evidence(run, verdict, kept)
        evidence["why"] = sentence
        return EvaluationTimeout(sentence, {**evidence, "passed": verdict["passed"], "ran": verdict["ran"]})

    def _evidence(self, run: Run, verdict: dict[str, Any], kept: str) -> dict[str, Any]:
        cut = run.log_bytes - len(run.log)
        return {
            "why": _plain(verdict["why"], LONGEST),
            "failing": [_plain(name, LONGEST) for name in verdict["failing"]],
            "failing_count": verdict["failing_count"],
            "not_run": [_plain(name, LONGEST) for name in verdict["not_run"]],
            "not_run_count": verdict["not_run_count"],
            "exit_code": run.exit_code,
            "log": _plain(run.log[-4 * TAIL :].decode("utf-8", "replace"))[-TAIL:],
            **({"log_cut_bytes": cut} if cut > 0 else {}),
            **({"log_file": kept, "patch_file": self._kept} if kept else {}),
            "commands": [command[:TAIL] for command in run.commands],
            **self._about_left_out(),
            "seconds": self._so_far(),
        }

    def _about_left_out(self) -> dict[str, Any]:
        count = len(self._left_out)
        shown = [_plain(path, LONGEST) for path in self._left_out[:SHOWN]]
        return {"left_out": shown, **({"left_out_count": count} if count > SHOWN else {})}

    def _so_far(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _zero(self, why: str, applies: float) -> Reward:
        parts = {"resolved": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0, "patch_applies": applies}
        why = _plain(why, 2 * LONGEST)
        evidence = {"why": why, "failing": [], **self._about_left_out(), "seconds": self._so_far()}
        return Reward(value=0.0, parts=parts, evidence=evidence)


def _plain(text: str, most: int | None = None) -> str:
    """What a policy's code printed, for a person's terminal: without colours and other control characters.

    The middle of what is longer than `most` is left out.
    """
    text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in COLOURS.sub("", text))
    if most is None or len(text) <= most:
        return text
    return f"{text[: most // 2]} … {text[-most // 2 :]}"


def _evaluated(patch: bytes, tests: list[str], gold: str) -> dict[str, Any]:
    """What of a patch is evaluated (`patch`), what is not (`left_out`), and why it can't be read (`wrong`).

    `changed`: paths of the evaluated part, but for those where the right patch works on pytest too. RUN left out the
    same files; a compiled file is left out too, for it could stand for a test that it was not made of.
    """
    try:
        check(patch)
        chosen = choose(patch, b"", tests, gold)
        kept, compiled = without(chosen["patch"], lambda path: path.endswith((".pyc", ".pyo")))
    except ValueError as error:
        return {"patch": b"", "left_out": [], "changed": [], "wrong": str(error)}
    parts = split(gold.encode("utf-8", "surrogateescape"))
    machinery = {path for part in parts if MACHINERY.search(part.data) for path in part.paths}
    changed = sorted({*paths_of(kept)} - machinery)
    return {"patch": kept, "left_out": [*chosen["left_out"], *compiled], "changed": changed, "wrong": ""}
