"""What an answer and a sent form are worth in the web family, and tasks that can't be scored."""

from __future__ import annotations

import json
from typing import Any

import pytest

import handlers
from handlers import web
from handlers.web.checks import Form, answer_in, differences, grade, same_answer
from pipeline.errors import GraderError, TaskError

HANDLER = handlers.load("web")


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("1947", "1947", True), ("  1947. ", "1947", True), ("'Ada  Brandt'", "ada brandt", True),
        ("84", "84.00", True), ("1,250", "1250", True), ("1,25", "125", False), ("84.01", "84.00", False),
        ("1947 or 1909", "1947", False), ("", "1947", False), ("nan", "nan", True), ("inf", "1e999", False),
    ],
)  # fmt: skip
def test_answers_are_compared_by_what_they_say(said: str, right: str, same: bool) -> None:
    assert same_answer(said, right) is same


def test_the_last_answer_counts_and_without_one_all_that_was_said() -> None:
    assert answer_in("<answer>1</answer> no: <ANSWER>\n2 </ANSWER>.") == "2"
    assert answer_in(" 1947 ") == "1947"
    assert answer_in("</answer><answer>1<answer>2</answer></answer><answer>3") == "2"
    assert answer_in("<answer>" * 100_000) == "<answer>" * 100_000


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        ([("f", {"a": "x ", "n": 4})], []),
        ([("f", {"a": "x", "n": "4", "news": "", "more": 1})], []),
        ([], ["'f' was never sent"]),
        ([("g", {"a": "x"})], ["'f' was never sent (sent was: g)"]),
        ([("f", {"a": "x", "n": "4"})] * 2, ["'f' was sent 2 times, once is wanted"]),
        ([("f", {"a": "y", "n": "4", "news": "yes"})], ["a is 'y', wanted 'x'", "news is 'yes', wanted None"]),
        ([("f", {"a": ["x", "x"]})], ["a is ['x', 'x'], wanted 'x'", "n is None, wanted '4'"]),
    ],
)
def test_what_was_sent_is_compared_field_by_field(sent: list[tuple[str, dict[str, Any]]], wrong: list[str]) -> None:
    wanted = Form(form="f", fields={"a": "x", "n": "4", "news": None})
    assert differences(wanted, [{"form": name, "fields": fields} for name, fields in sent]) == wrong


def test_both_parts_count_and_the_evidence_says_why() -> None:
    sent = [{"form": "f", "fields": {"items": {"clip": 2}}}]
    state = {"sent": sent, "visited": ["http://s.test/"], "web": {"calls": 3, "restarts": 1}}
    form = Form(form="f", fields={"items": {"clip": 2}})
    right = grade(("84",), form, "<answer>84.00</answer>", state)
    assert (right.value, right.parts) == (1.0, {"answer": 1.0, "state": 1.0})
    assert right.evidence["why"] == "the answer is right and the site was sent what was asked for"
    assert (right.evidence["calls"], right.evidence["browsers"]) == (3, 2)
    half = grade(("84",), form, "83", state)
    assert (half.value, half.parts) == (0.0, {"answer": 0.0, "state": 1.0})
    assert half.evidence["why"] == "the answer is '83', wanted '84'"
    assert grade((), form, "", state).parts == {"state": 1.0}


def test_without_a_record_nothing_is_scored() -> None:
    with pytest.raises(GraderError, match="no record"):
        grade((), Form(form="f", fields={}), "done", {})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"answer": ""}, "neither `answer` nor `check`"),
        ({"site": "../etc"}, "field 'site' is '../etc'"),
        ({"start": "visit.html"}, "field 'start' is 'visit.html'"),
        ({"question": " "}, "field 'question'"),
        ({"check": {"form": "f"}}, "field 'check.fields' is missing"),
        ({"gold": [{"name": "open"}]}, "field 'gold.0.tool' is missing"),
    ],
)
def test_a_task_that_can_not_be_scored_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=".*") as caught:
        handlers.check_task(HANDLER, {"site": "museum", "question": "?", "answer": "1", **changes})
    assert sentence in str(caught.value)


def test_each_site_of_ours_has_a_task_and_each_task_a_gold() -> None:
    tasks = [json.loads(line) for line in (web.PACKAGE / "tasks.jsonl").read_text("utf-8").splitlines()]
    sites = {path.name for path in (web.PACKAGE / "sites").iterdir()}
    checked: list[Any] = [handlers.check_task(HANDLER, task["data"]) for task in tasks]
    assert {task.site for task in checked} == sites and {task["handler"] for task in tasks} == {"web"}
    assert len({HANDLER.prompt(task) for task in checked}) == len(tasks)  # type: ignore[attr-defined]
    for task in checked:
        files = HANDLER.sandbox_for(task)["files"]
        assert f"{web.FOLDER}/site/index.html" in files and f"{web.LIBRARY}/browser.py" in files
        assert not [name for name in files if name.endswith("tasks.jsonl")], "answers don't go into the sandbox"
        said: Any = HANDLER.gold(task)
        assert said and said[-1]["content"].startswith("<answer>")
        assert {message["tool_calls"][0]["function"]["name"] for message in said[:-1]} <= set(web.Web.tools)
