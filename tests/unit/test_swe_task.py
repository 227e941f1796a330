"""Rows of the datasets as they are: their images, folders, test commands, parsers and lists of tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

import handlers
from handlers.swe import Swe, task as rows
from handlers.swe.task import SweTask
from pipeline.errors import TaskError

TESTS = """\
diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-a
+b
diff --git a/tests/data/x.json b/tests/data/x.json
new file mode 100644
--- /dev/null
+++ b/tests/data/x.json
@@ -0,0 +1 @@
+{}
diff --git a/tests/test_old.py b/tests/test_old.py
deleted file mode 100644
--- a/tests/test_old.py
+++ /dev/null
@@ -1 +0,0 @@
-a
"""


def row(**changes: Any) -> SweTask:
    plain = {
        "instance_id": "some__body-7",
        "repo": "some/body",
        "base_commit": "a" * 40,
        "problem_statement": "It is broken.",
        "patch": "",
        "test_patch": TESTS,
        "FAIL_TO_PASS": ["tests/test_a.py::test_x"],
        "PASS_TO_PASS": '["tests/test_a.py::test_y", "tests/test_a.py::test_z"]',
        "created_at": "2020",
        "hints_text": None,
    }
    return SweTask.model_validate({**plain, **changes})


def test_lists_come_as_lists_and_as_json_text() -> None:
    task = row()
    assert rows.fail_to_pass(task) == ["tests/test_a.py::test_x"]
    assert rows.pass_to_pass(task) == ["tests/test_a.py::test_y", "tests/test_a.py::test_z"]
    assert rows.pass_to_pass(row(PASS_TO_PASS=None)) == [] and task.hints_text == ""
    with pytest.raises(TaskError, match="FAIL_TO_PASS.*no JSON list of test names: 'tests/a"):
        handlers.check_task(Swe(), {**row().model_dump(), "FAIL_TO_PASS": "tests/a, tests/b"})


def test_a_row_that_lacks_something_says_what() -> None:
    with pytest.raises(TaskError, match="'base_commit' is missing.*'problem_statement' is missing"):
        handlers.check_task(Swe(), {"instance_id": "x", "FAIL_TO_PASS": []})
    with pytest.raises(TaskError, match="'base_commit' is '--upload-pack=x'"):
        handlers.check_task(Swe(), {**row().model_dump(), "base_commit": "--upload-pack=x"})


@pytest.mark.parametrize(
    ("changes", "image"),
    [
        ({}, "docker://xingyaoww/sweb.eval.x86_64.some_s_body-7:latest"),
        (
            {"instance_id": "django__django-11099", "repo": "django/django"},
            "docker://swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
        ),
        ({"docker_image": "swerebench/sweb.eval.x86_64.x"}, "docker://swerebench/sweb.eval.x86_64.x"),
        ({"image_name": "docker.io/swerebenchv2/a:1-b"}, "docker://docker.io/swerebenchv2/a:1-b"),
        ({"image": "swebench/a:latest", "image_name": "not/this"}, "docker://swebench/a:latest"),
        ({"image": "mine"}, "mine"),
        ({"image": "/images/{name}/{instance_id}.sif"}, "/images/body/some__body-7.sif"),
        ({"image": "docker://mirror:5000/{repo}:{instance_id}"}, "docker://mirror:5000/some/body:some__body-7"),
    ],
)
def test_the_image_follows_from_the_row(changes: dict[str, Any], image: str) -> None:
    assert rows.image_of(row(**changes)) == image


def test_the_folder_follows_from_the_row() -> None:
    assert row().workdir == "/testbed"
    assert row(image_name="docker.io/swerebenchv2/a:1").workdir == "/body"
    assert row(image_name="docker.io/swerebenchv2/a:1", workdir="/w").workdir == "/w"


def test_the_sandbox_has_the_image_and_what_the_task_asks_for() -> None:
    asked = Swe().sandbox_for(row(image="mine", sandbox={"memory_mb": 4000}))
    assert asked == {"image": "mine", "workdir": "/testbed", "network": "none", "memory_mb": 4000}


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "pytest -rA tests/test_a.py"),
        ({"test_command": "make check"}, "make check"),
        ({"install_config": {"test_cmd": "pytest -q"}}, "pytest -q tests/test_a.py"),
        ({"install_config": '{"test_cmd": "pytest -q"}'}, "pytest -q tests/test_a.py"),
        ({"install_config": {"test_cmd": "pytest -q tests/test_a.py"}}, "pytest -q tests/test_a.py"),
        ({"install_config": {"test_cmd": ["cd x", "go test ./..."]}}, "cd x\ngo test ./..."),
        ({"install_config": {"test_cmd": "npm test"}}, "npm test"),
        ({"repo": "django/django"}, "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_a"),
        ({"repo": "sphinx-doc/sphinx"}, "tox --current-env -epy39 -v -- tests/test_a.py"),
    ],
)
def test_the_command_runs_the_files_that_the_test_patch_leaves(changes: dict[str, Any], command: str) -> None:
    assert rows.test_command_of(row(**changes)) == command


def test_an_eval_script_gives_the_command_and_the_prelude() -> None:
    script = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
export LANG=en_US.UTF-8
git apply -v - <<'EOF_1'
diff --git a/x b/x
export EVIL=1
EOF_1
: '>>>>> Start Test Output'
pytest -rA tests/test_a.py
: '>>>>> End Test Output'
git checkout abc tests/test_a.py
"""
    task = row(eval_script=script)
    assert rows.test_command_of(task) == "pytest -rA tests/test_a.py"
    assert rows.prelude_of(task).endswith(
        "source /opt/miniconda3/bin/activate\nconda activate testbed\nexport LANG=en_US.UTF-8\n"
    )
    assert rows.prelude_of(row(prelude="export A=1")) == "export A=1" and "conda activate" in rows.prelude_of(row())
    with pytest.raises(TaskError, match="'eval_script' of some__body-7 has no line with"):
        rows.test_command_of(row(eval_script="pytest"))


def test_parsers_are_named_by_the_row_or_known_by_repository() -> None:
    assert rows.log_parser_of(row()) == "parse_log_pytest"
    assert rows.log_parser_of(row(repo="django/django")) == "parse_log_django"
    assert rows.log_parser_of(row(install_config={"log_parser": "parse_log_gotest"})) == "parse_log_gotest"
    assert rows.log_parser_of(row(install_config={"log_parser": "x"}, log_parser="y")) == "y"


def test_test_files_are_all_that_the_test_patch_touches() -> None:
    assert rows.test_files(row()) == ["tests/test_a.py", "tests/data/x.json", "tests/test_old.py"]
    assert rows.present_test_files(row()) == ["tests/test_a.py", "tests/data/x.json"]
    assert rows.test_files(row(test_patch="")) == []
    with pytest.raises(TaskError, match="'test_patch' of some__body-7: this is no git diff"):
        rows.test_files(row(test_patch="--- a\n+++ b\n"))


@pytest.mark.parametrize(
    ("command", "takes"),
    [
        ("pytest -rA", True),
        ("python -m pytest", True),
        ("cd x && /opt/py.test -q", True),
        ("pytest a.py", False),
        ("npm run pytester", False),
        ("pytest -q; go test", False),
    ],
)
def test_which_commands_take_files(command: str, takes: bool) -> None:
    assert rows.takes_files(command) == takes


def test_the_gold_comes_in_pieces_that_any_limit_of_a_reply_holds() -> None:
    patch = "diff --git a/x b/x\n" + "a line\n" * 1000
    *writing, submit = Swe().gold(row(patch=patch)) or []
    assert len(json.dumps(writing)) / len(writing) < 1100
    assert submit.get("tool_calls", [])[0]["function"]["name"] == "submit"
    assert Swe().gold(row()) is None
