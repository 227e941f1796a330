"""Handlers by name, their task data, and what the built-in ones score."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers import echo, reason
from pipeline.errors import GraderError, HandlerError, TaskError, UnknownHandler
from pipeline.interfaces import Context


def context(handler: Any, data: dict[str, Any], answer: str = "", **state: Any) -> Context:
    return Context(
        id="g.3", group="g", sample=3, lane="train", attempt=1, task=handlers.check_task(handler, data),
        log=logging.LoggerAdapter(logging.getLogger("test")), state={"answer": answer, **state},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a user's handlers, gone from the import path afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("name", handlers.BUILT_IN)
def test_built_in_handlers_load_without_heavy_libraries(name: str) -> None:
    heavy = {"torch", "transformers", "vllm"} & sys.modules.keys()
    assert handlers.digest(handlers.load(name)) == handlers.digest_of(name)
    assert {"torch", "transformers", "vllm"} & sys.modules.keys() == heavy


def test_a_users_handler_is_found_in_its_folder(folder: Path) -> None:
    (folder / "mine_a.py").write_text("from pipeline import AgentHandler\nclass Mine(AgentHandler):\n    pass\n")
    assert type(handlers.load("mine_a:Mine", folder)).__name__ == "Mine"
    assert len(handlers.digest_of("mine_a:Mine", folder)) == 12


@pytest.mark.parametrize(
    ("name", "text", "kind", "words"),
    [
        ("ech", "", UnknownHandler, "did you mean echo.*known: echo, math, .*, or module:Class"),
        ("nowhere_x:Mine", "", UnknownHandler, "there is no module nowhere_x.*looked for in /"),
        ("mine_b:Other", "class Mine: pass", UnknownHandler, "has no Other"),
        ("mine_c:Mine", "class Mine: pass", HandlerError, "not a subclass of AgentHandler"),
        ("mine_d:Mine", "import no_such_library_x", HandlerError, "needs no_such_library_x, which is not installed"),
        ("mine_e:Mine", "1 / 0", HandlerError, "does not import: ZeroDivisionError: division by zero"),
        ("mine_f:Mine", "def f(:", HandlerError, "does not import: SyntaxError"),
        ("mine_g:Mine", "raise SystemExit(3)", HandlerError, "does not import: SystemExit: 3"),
    ],
)
def test_a_handler_that_can_not_be_had_is_explained(
    folder: Path, name: str, text: str, kind: type[Exception], words: str
) -> None:
    if ":" in name and text:
        (folder / f"{name.split(':')[0]}.py").write_text(text)
    with pytest.raises(kind, match=words) as caught:
        handlers.load(name, folder)
    assert kind is UnknownHandler or not isinstance(caught.value, UnknownHandler)


def test_the_users_own_traceback_stays(folder: Path) -> None:
    (folder / "mine_h.py").write_text("def deep():\n    raise KeyError('merge')\ndeep()\n")
    with pytest.raises(HandlerError) as caught:
        handlers.load("mine_h:Mine", folder)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("math", {"question": "q"}, "field 'expected_answer' is missing"),
        ("math", {"question": 3, "expected_answer": "1"}, "field 'question' is 3: input should be a valid string"),
        ("math", {"question": "q", "expected_answer": None}, "field 'expected_answer' is None"),
        ("echo", {"tokns": 3}, r"field 'tokns' is unknown \(known: text, sleep, tokens\)"),
        ("echo", {"sleep": float("inf")}, "field 'sleep' is inf"),
        ("reason", {"family": "gcd", "seed": -1}, "field 'seed' is -1"),
        ("echo", ["x"], "the task's data is a list"),
    ],
)
def test_wrong_task_data_is_named(name: str, data: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        handlers.check_task(handlers.load(name), data)


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 1000])
async def test_echo_carries_tokens_that_name_its_rollout(tokens: int) -> None:
    handler = handlers.load("echo")
    ctx = context(handler, {"text": "hi", "tokens": tokens})
    await handler.init(ctx)
    await handler.run(ctx)
    trajectory = ctx.trajectory.build()
    assert (len(trajectory), ctx.answer, await handler.eval(ctx)) == (tokens, "hi", 1.0)
    if tokens:
        named = trajectory.sequences[0].token_ids[: min(tokens, echo.SIGNED)].tolist()
        assert tuple(named) == echo.signature("g.3")[: len(named)] != echo.signature("g.4")[: len(named)]


@pytest.mark.parametrize("family", ["gsm_symbolic", "chain_sum", "ransom_note"])
def test_reason_scores_by_the_familys_own_scorer(family: str) -> None:
    handler: Any = handlers.load("reason")
    ctx = context(handler, {"family": family, "seed": 5, "index": 7})
    handler.init(ctx)
    gold = handler.gold(ctx.task)
    for text, score in ((f"Well.\n<answer>{gold}</answer>", 1.0), (gold, 1.0), ("<answer>-1</answer>", 0.0), ("", 0.0)):
        ctx.state["answer"] = text
        assert (handler.eval(ctx).value == 1.0) is (score == 1.0)
    assert handler.question(ctx.task) == handler.messages(ctx)[0]["content"]


def test_an_item_that_is_not_the_one_that_was_asked_is_not_scored() -> None:
    handler: Any = handlers.load("reason")
    ctx = context(handler, {"family": "gcd"}, "<answer>1</answer>", question="another one")
    with pytest.raises(GraderError, match="PYTHONHASHSEED"):
        handler.eval(ctx)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"family": "gsm_symbolc"}, r"unknown \(known: gsm_symbolic, "),
        ({"family": "gcd", "config": {"min_nmbers": 3}}, "field 'config'"),
        ({"family": "gcd", "config": {"min_numbers": -3}}, "field 'config'"),
    ],
)
def test_a_puzzle_that_can_not_be_made_is_explained(data: dict[str, Any], words: str) -> None:
    handler: Any = handlers.load("reason")
    with pytest.raises(TaskError, match=words):
        handler.init(context(handler, data))


def test_a_scorer_that_an_answer_breaks_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    handler: Any = handlers.load("reason")
    ctx = context(handler, {"family": "gcd"}, "<answer>bad</answer>")
    handler.init(ctx)
    dataset = reason._dataset_of(ctx.task)

    def score(answer: str, entry: dict[str, Any]) -> float:
        if answer == "bad":
            raise ZeroDivisionError("x")
        return 1.0

    monkeypatch.setattr(dataset, "score_answer", score)
    assert handler.eval(ctx).value == 0.0
    monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: 1 / 0)
    with pytest.raises(GraderError, match="on the right answer too"):
        handler.eval(ctx)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> no: <answer> 2 </answer>", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("so\n\n 7 \n", "7"),
        ("<answer>open", "<answer>open"),
        ("", None),
    ],
)
def test_answers_are_found(text: str, answer: str | None) -> None:
    assert reason.extract(text)[0] == answer


@pytest.mark.parametrize(("module", "quiet"), [("handlers.gym", True), ("reasoning_gym", False)])
def test_reasoning_gym_comes_without_its_dependencies_warnings(module: str, quiet: bool, tmp_path: Path) -> None:
    for name, text in (
        ("cellpylib/__init__.py", "x = 1\nx is 1\n"),
        ("reasoning_gym/__init__.py", "import cellpylib\n"),
        ("reasoning_gym/factory.py", "DATASETS = {}\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import {module}"], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and ("SyntaxWarning" not in done.stderr) is quiet, done.stderr
