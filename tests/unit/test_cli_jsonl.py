"""Task files: every bad line is told by its number, what is wrong with it, and what is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.envelope import Task
from pipeline.errors import TaskError, UnknownHandler
from workers.jsonl import Checker, read

GOOD = '{"handler": "echo", "data": {"text": "x"}}'


def tasks(*lines: str | bytes, handler: str | None = None, check: bool = True) -> list[Task]:
    return read(lines, handler=handler, checker=Checker(None, check=check), name="t.jsonl")


def test_a_full_task() -> None:
    line = (
        '{"handler": "echo", "id": "a", "data": {"text": "x"}, "sampling": {"temperature": 0.5}, "limits": {"run": 60}}'
    )
    (task,) = tasks(line)
    assert task == Task(handler="echo", id="a", data={"text": "x"}, sampling={"temperature": 0.5}, limits={"run": 60})


def test_bare_data_takes_the_files_handler_and_gives_its_id() -> None:
    (task,) = tasks('{"question": "1+1?", "expected_answer": "2", "id": 7}', handler="math")
    assert task == Task(handler="math", id="7", data={"question": "1+1?", "expected_answer": "2"})


def test_a_full_task_keeps_its_own_handler() -> None:
    assert [task.handler for task in tasks(GOOD, '{"data": {"text": "y"}}', handler="echo")] == ["echo", "echo"]
    assert tasks('{"handler": "echo", "data": {}}', handler="math")[0].handler == "echo"


def test_empty_lines_are_passed_over_but_counted() -> None:
    with pytest.raises(TaskError, match=r"t\.jsonl, line 3:"):
        tasks(GOOD, "", "nonsense")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no valid JSON"),
        ('{"handler": "echo", "data": {"sleep": NaN}}', "NaN is no JSON number"),
        ('{"handler": "echo", "data": {"sleep": 1e999}}', "1e999 is beyond every float"),
        ("[1]", "a JSON list, wanted a map"),
        ("3", "a JSON number"),
        ('{"question": "x"}', "names no handler"),
        ('{"handler": "echo"}', "field 'data' is missing"),
        ('{"handler": "echo", "data": 3}', "field 'data' is a number, wanted a map"),
        ('{"handler": "echo", "data": {}, "sample": 3}', "field 'sample' is unknown (known: handler, data"),
        ('{"handler": 3, "data": {}}', "Task.handler is 3"),
        ('{"handler": "echo", "data": {}, "deadline": "soon"}', "Task.deadline is 'soon'"),
        ('{"handler": "echo", "data": {"text": 3}}', "field 'text' is 3"),
        ('{"handler": "echo", "data": {"txet": "x"}}', "field 'txet' is unknown (known: text, sleep, tokens)"),
        ('{"handler": "echo", "data": {}, "id": ""}', "can't name a group"),
        ('{"handler": "echo", "data": {}, "id": "a\\nb"}', "can't name a group"),
        (b'{"handler": "\xff"}', "no UTF-8"),
        ("[" * 100_000, "no valid JSON"),
    ],
)
def test_a_bad_line(line: str | bytes, says: str) -> None:
    with pytest.raises(TaskError) as caught:
        tasks(GOOD, line)
    assert str(caught.value).startswith("t.jsonl, line 2: ")
    assert says in str(caught.value)


def test_an_unknown_handler_lists_the_known() -> None:
    with pytest.raises(
        UnknownHandler, match=r"line 1: unknown handler 'ecoh' \(did you mean echo\?\).*known: echo, math, .*reason"
    ):
        tasks('{"handler": "ecoh", "data": {}}')


def test_an_id_that_stands_twice_is_told() -> None:
    with pytest.raises(TaskError, match="line 3: id 'a' stands in line 1 too"):
        tasks('{"handler": "echo", "data": {}, "id": "a"}', GOOD, '{"handler": "echo", "data": {}, "id": "a"}')


def test_an_empty_file_is_no_success() -> None:
    with pytest.raises(TaskError, match="holds no task"):
        tasks("", " ")


def test_unchecked_data_passes() -> None:
    assert tasks('{"handler": "elsewhere:Only", "data": {"x": 1}}', check=False)[0].handler == "elsewhere:Only"


def test_a_handler_that_does_not_load_here_is_said_and_its_tasks_pass(tmp_path: Path) -> None:
    (tmp_path / "needs_what_is_not_here.py").write_text("import not_installed_anywhere\n")
    checker = Checker(str(tmp_path))
    line = '{"handler": "needs_what_is_not_here:Mine", "data": {}}'
    assert len(read([line, line], handler=None, checker=checker)) == 2
    assert len(checker.skipped) == 1 and "not_installed_anywhere" in checker.skipped[0]
