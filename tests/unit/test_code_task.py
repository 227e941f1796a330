"""Programming tasks in the forms that datasets have, and where the program stands in an answer."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.code import Code
from handlers.code.blocks import last_block
from handlers.code.task import CodeTask, Test as Case, tests_of as cases_of
from pipeline.errors import TaskError

HANDLERS = Path(handlers.__file__).parent


def made(**data: Any) -> list[Case]:
    return cases_of(CodeTask.model_validate({"question": "q", **data}).model_dump())


STDIN = [Case("", "1 2", ["3"])]
FUNCTION = [Case("f", "[1, [2]]", ["3"])]
APPS = {"inputs": ["1 2"], "outputs": ["3"]}
APPS_FUNCTION = {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}
LCB = [{"input": "1\n[2]\n", "output": "3", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LCB)))).decode()


@pytest.mark.parametrize(
    ("data", "tests"),
    [
        ({"tests": [{"input": "1 2", "output": "3"}]}, STDIN),
        ({"tests": [{"input": ["1", "2"], "output": 3}]}, [Case("", "1\n2", ["3"])]),
        ({"tests": [{"input": "", "output": "a", "alternatives": ["b"]}]}, [Case("", "", ["a", "b"])]),
        ({"tests": [{"args": [1, [2]], "expected": 3, "fn_name": "f"}]}, FUNCTION),
        ({"tests": [{"args": [1, [2]], "output": 3}], "fn_name": "f"}, FUNCTION),
        ({"tests": [{"kwargs": {"a": 1}, "expected": (1, 2)}], "fn_name": "f"}, [Case("f", '{"a": 1}', ["[1, 2]"])]),
        ({"tests": [{"args": [], "expected": None, "fn_name": "f"}]}, [Case("f", "[]", ["null"])]),
        ({"tests": [{"args": [], "expected": "", "fn_name": "f"}]}, [Case("f", "[]", ['""', "null"])]),
        ({"input_output": json.dumps(APPS)}, STDIN),
        ({"input_output": APPS}, STDIN),
        ({"input_output": json.dumps(APPS_FUNCTION)}, [Case("f", "[1, [2]]", ["[3]", "3"])]),
        ({"input_output": {**APPS_FUNCTION, "outputs": [[]]}}, [Case("f", "[1, [2]]", ["[]", "null"])]),
        ({"input_output": {**APPS_FUNCTION, "outputs": [[3, 4]]}}, [Case("f", "[1, [2]]", ["[3, 4]"])]),
        ({"reward_model": {"ground_truth": json.dumps(APPS)}}, STDIN),
        ({"reward_model": {"ground_truth": {"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["3"]}}}, FUNCTION),
        ({"public_test_cases": json.dumps(LCB), "metadata": '{"func_name": "f"}'}, FUNCTION),
        ({"public_test_cases": LCB, "private_test_cases": PACKED, "metadata": {"func_name": "f"}}, FUNCTION * 2),
        ({"public_test_cases": [{"input": "1 2", "output": "3", "testtype": "stdin"}], "metadata": {}}, STDIN),
    ],
)
def test_every_form_gives_the_same_tests(data: dict[str, Any], tests: list[Case]) -> None:
    assert made(**data) == tests


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "the task has no tests"),
        ({"tests": []}, "the task has no tests"),
        ({"tests": [{"input": "1"}]}, r"tests\[0\] has no `output`"),
        ({"tests": "{"}, "field 'tests' is '{', which is no JSON"),
        ({"tests": "3"}, "must be a list of maps"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "two lists of one length"),
        ({"public_test_cases": LCB}, "neither it nor the task says which"),
        ({"tests": [{"args": [1], "expected": 1}], "fn_name": "f", "language": "cpp"}, "are for python"),
        ({"private_test_cases": "AAAA"}, "neither JSON nor packed"),
        (
            {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()},
            "it names builtins.print",
        ),
        ({"tests": [{"input": "\ud800", "output": "1"}]}, "no proper text"),
    ],
)
def test_wrong_tests_are_the_tasks_fault(data: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TaskError, match=said):
        made(**data)
    assert capsys.readouterr().out == ""


def test_fields_of_the_datasets() -> None:
    handler = handlers.load("handlers.code:Code")
    row = {"question": "q", "time_limit": "2.0 seconds", "solutions": '["print(1)"]', "unknown": 1}
    task = handlers.check_task(handler, row)
    assert task.time_limit == 2.0
    assert handler.gold(task) == [{"role": "assistant", "content": "```python\nprint(1)\n```"}]
    assert handler.gold(handlers.check_task(handler, {"question": "q"})) is None
    chat = [{"role": "user", "content": "do it"}]
    assert handler.prompt(handlers.check_task(handler, {"prompt": chat})) == chat  # type: ignore[attr-defined]
    for wrong, said in (
        ({}, "it has no question"),
        ({"question": "q", "language": "java"}, "give `command` and `file`"),
        ({"question": "q", "time_limit": 0}, "time_limit"),
    ):
        with pytest.raises(TaskError, match=said):
            handlers.check_task(handler, wrong)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("no block", None),
        ("```python\nx\n```", "x\n"),
        ("```python\nx\n```\nIt prints\n```\n3\n```\n```text\n3\n```", "x\n"),
        ("```python\nx\n```\nbetter:\n```py\ny\n```", "y\n"),
        ("```\nx\n```", "x\n"),
        ("```cpp\nx\n```", None),
        ("```python\nx\n```\n```python\ncut off", "x\n"),
        ("```python\ncut off", None),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("1. so:\n   ```Python\n   x\n   ```", "   x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("```python\n```", "\n"),
    ],
)
def test_the_program_is_the_last_block_of_its_language(answer: str, program: str | None) -> None:
    assert last_block(answer, "python", "py") == program


@pytest.mark.parametrize("name", ["code/runner.py", "code/caller.py", "sql_inside.py"])
def test_what_runs_in_a_sandbox_is_python_3_6_and_imports_its_library_alone(name: str) -> None:
    tree = ast.parse((HANDLERS / name).read_text(encoding="utf-8"), feature_version=(3, 6))
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert "__future__" not in imported  # Python 3.6 has no `annotations`
    assert not {item for item in imported if item and item.split(".")[0] in ("handlers", "pipeline", "workers")}


@pytest.mark.parametrize(
    "data",
    [
        {"input_output": '{"fn_name": "twice", "inputs": [[1]], "outputs": [2]}'},
        {"tests": [{"args": [1], "expected": 2, "fn_name": "twice"}]},
        {"reward_model": {"ground_truth": '{"fn_name": "twice", "inputs": [[1]], "outputs": [2]}'}},
        {
            "public_test_cases": '[{"input": "1", "output": "2", "testtype": "functional"}]',
            "metadata": '{"func_name": "twice"}',
        },
    ],
)
def test_a_function_is_asked_for_wherever_the_dataset_names_it(data: dict[str, Any]) -> None:
    asked = Code().prompt(CodeTask(question="Double it.", **data))
    assert "Write a python function `twice`" in str(asked)


def test_a_test_without_an_input_is_a_mistake() -> None:
    with pytest.raises(TaskError, match=r"tests\[0\] has no `input` and no `args`; it has: stdin, output"):
        made(tests=[{"stdin": "1", "output": "3"}])
