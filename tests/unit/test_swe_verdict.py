"""What a test run is worth, on short logs and reports that were made here."""

from __future__ import annotations

import importlib.util
import json
from hashlib import blake2b
from typing import Any

import pytest

from handlers.swe import verdict
from handlers.swe.signed import facts_of, records_of
from handlers.swe.test_run import with_plugin
from handlers.swe.verdict import check_parser, is_pytest, judge, read, status_of
from pipeline.errors import HandlerError, TaskError

KEY = b"k" * 32


def signed(*records: dict[str, Any]) -> bytes:
    """A report as the plugin writes it."""
    key, before, lines = KEY, b"", []
    for record in records:
        text = json.dumps(record).encode()
        before = blake2b(before + text, key=key, digest_size=16).digest()
        key = blake2b(b"next", key=key, digest_size=32).digest()
        lines.append(text + b" " + before.hex().encode() + b"\n")
    return b"".join(lines)


BEGIN = {"kind": "begin", "pytest": "8", "python": "3"}
END = {"kind": "end", "exit": 1}
GOOD = {"kind": "canary", "wanted": "failed", "got": "failed", "ran": True}


def ran(**statuses: str) -> list[dict[str, Any]]:
    return [{"kind": "test", "test": f"t.py::{name}", "status": status} for name, status in statuses.items()]


def judged(report: bytes = b"", f2p: tuple[str, ...] = ("t.py::a",), p2p: tuple[str, ...] = (), **more: Any) -> Any:
    run = {"parser": "parse_log_pytest", "log": b"", "report": report, "key": KEY, "exit_code": 0, "digests": {},
           "changed": [], "fail_to_pass": list(f2p), "pass_to_pass": list(p2p)}  # fmt: skip
    return judge({**run, **more})


def test_all_that_must_pass_did() -> None:
    found = judged(signed(BEGIN, GOOD, *ran(a="PASSED", b="XFAIL", other="FAILED"), END), p2p=("t.py::b",))
    assert found["resolved"] and found["why"] == "all 2 tests that must pass did" and found["forged"] == ""
    assert (found["fail_to_pass"], found["pass_to_pass"], found["passed"], found["ran"]) == (1.0, 1.0, 2, 2)


def test_a_listed_test_that_never_ran_fails_with_its_name() -> None:
    found = judged(signed(BEGIN, *ran(a="PASSED"), END), p2p=("t.py::b", "t.py::c"))
    assert not found["resolved"] and found["not_run"] == ["t.py::b", "t.py::c"] and found["pass_to_pass"] == 0.0
    assert found["why"] == "2 of 3 tests that must pass did not, the first is t.py::b (never ran)"


@pytest.mark.parametrize("status", ["FAILED", "ERROR", "SKIPPED", "XPASS", "NOTHING"])
def test_no_other_status_passes(status: str) -> None:
    found = judged(signed(BEGIN, *ran(a="PASSED", b=status), END), p2p=("t.py::b",))
    assert not found["resolved"] and (found["fail_to_pass"], found["pass_to_pass"]) == (1.0, 0.0)


def test_of_a_test_that_ran_twice_the_worse_counts() -> None:
    for order in (("PASSED", "FAILED"), ("FAILED", "PASSED")):
        assert not judged(signed(BEGIN, *(ran(a=status)[0] for status in order), END))["resolved"]


def test_names_in_the_evidence_are_few_and_counted() -> None:
    found = judged(signed(BEGIN, END), p2p=tuple(f"t.py::{number}" for number in range(50)))
    assert len(found["not_run"]) == 20 and found["not_run_count"] == 51 and found["failing"] == []


def test_a_log_alone_never_makes_a_pytest_test_pass() -> None:
    found = judged(log=b"PASSED t.py::a\n1 passed in 0.1s\n")
    assert not found["resolved"] and found["why"].startswith("pytest never began to run tests")
    assert found["passed"] == 0


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([BEGIN, *ran(a="PASSED")], "the test run ended early, outside of any test: it never came to its end"),
        (
            [BEGIN, {"kind": "start", "test": "t.py::a"}],
            "the test run ended early, in t.py::a: it never came to its end",
        ),
        ([BEGIN, *ran(a="PASSED"), {"kind": "end", "exit": 2}], "the session was interrupted (exit status 2)"),
        (
            [BEGIN, {"kind": "uncollected", "test": "t.py", "text": "E  SyntaxError"}, {"kind": "end", "exit": 2}],
            "the session was interrupted (exit status 2): t.py could not be collected: E  SyntaxError",
        ),
        ([BEGIN, *ran(a="PASSED"), END, BEGIN], "the test run ended early, outside of any test"),
        (
            [BEGIN, GOOD | {"got": "passed"}, *ran(a="PASSED"), END],
            "the run can't be believed: a test of the grader's that must fail ended as passed",
        ),
        (
            [BEGIN, {"kind": "canary", "wanted": "passed", "got": "passed", "ran": False}, *ran(a="PASSED"), END],
            "the run can't be believed: a test of the grader's passed without being run",
        ),
        ([BEGIN, *ran(a="PASSED"), {"kind": "forged", "why": "X was replaced"}, END], "X was replaced"),
        (
            [BEGIN, {"kind": "file", "path": "/w/d/t.py", "digest": "0"}, *ran(a="PASSED"), END],
            "the test file d/t.py was another one when pytest read it",
        ),
    ],
)
def test_what_is_not_whole_or_was_forged_is_not_resolved(records: list[dict[str, Any]], why: str) -> None:
    found = judged(signed(*records), digests={"d/t.py": "1"})
    assert not found["resolved"] and why in found["why"]


def test_a_canary_that_its_module_s_fixtures_kept_from_running_says_nothing() -> None:
    kept = {"kind": "canary", "wanted": "failed", "got": "none", "ran": False}
    assert judged(signed(BEGIN, kept, *ran(a="PASSED"), END))["resolved"]


def test_a_changed_test_file_is_not_believed_and_takes_all_shares() -> None:
    found = judged(signed(BEGIN, *ran(a="PASSED"), END), changed=["t.py"])
    assert not found["resolved"] and found["forged"] == "the test file t.py was changed while the tests ran"
    assert found["fail_to_pass"] == 0.0


REPORT = signed(BEGIN, *ran(a="FAILED", b="PASSED"), END)
LINES = REPORT.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (REPORT.replace(b"FAILED", b"PASSED"), 2),
        (LINES[0] + LINES[2] + LINES[3], 2),
        (LINES[0] + LINES[2] + LINES[1] + LINES[3], 2),
        (REPORT + b'{"kind": "test"} 00\n', 5),
        (REPORT + b"x", 5),
        (b"\n" + REPORT, 1),
        (REPORT + LINES[3], 5),
        (signed(BEGIN) + signed(*ran(a="PASSED"), END), 2),
        (b"\xff\xfe not a report", 1),
    ],
)
def test_a_report_that_somebody_else_wrote_into_is_not_believed(report: bytes, line: int) -> None:
    records, wrong = records_of(report, KEY)
    assert len(records) == line - 1 and wrong == f"line {line} of the report was not written by the grader"
    assert not judged(report, f2p=("t.py::b",))["resolved"]


def test_a_report_that_was_cut_is_not_whole() -> None:
    assert records_of(b"".join(LINES[:3]), KEY)[1] == ""
    assert "ended early" in facts_of(b"".join(LINES[:3]), KEY, {}).unfinished
    assert not judged(b"".join(LINES[:3]), f2p=("t.py::b",))["resolved"]


def test_names_are_cut_as_the_task_s_parser_cuts_them() -> None:
    names = {"test": "t.py::a[one two]", "status": "PASSED"}, {"test": "t.py::a[one three]", "status": "FAILED"}
    report = signed(BEGIN, *({"kind": "test", **name} for name in names), END)
    assert not judged(report, f2p=("t.py::a[one",))["resolved"], "it stands for both, and one failed"
    assert judged(report, f2p=("t.py::a[one two]",), parser="parse_log_pytest_v2")["resolved"]
    report = signed(BEGIN, {"kind": "test", "test": "t.py::a[/tmp/x/y]", "status": "PASSED"}, END)
    assert judged(report, f2p=("t.py::a[/y]",), parser="parse_log_pytest_options")["resolved"]


@pytest.mark.parametrize("name", ["t.py::a[ü-🙂]", "t.py::a[x[0]]", "t.py::A::b", "t.py::a[- -]", "t.py::a[%s]"])
def test_odd_names_are_found(name: str) -> None:
    report = signed(BEGIN, {"kind": "test", "test": name, "status": "PASSED"}, END)
    assert judged(report, f2p=(name,), parser="parse_log_pytest_v2")["resolved"]


def test_a_name_that_was_cut_in_a_list_stands_for_all_that_begin_so() -> None:
    statuses = {"t::a[1, 2]": "PASSED", "t::a[1, 3]": "FAILED", "t::b[x y]": "PASSED"}
    assert status_of("t::a[1,", statuses) == "FAILED" and status_of("t::b[x", statuses) == "PASSED"
    assert status_of("t::b", statuses) == "" and status_of("t::c[", statuses) == ""


# -- logs of other runners ---------------------------------------------------------------------------------------------

DJANGO = """\
test_one (app.tests.T) ... ok
test_two (app.tests.T) ... {two}
test_three (app.tests.T) ... skipped 'no database'
{more}
"""
ONE, TWO, THREE = (f"test_{number} (app.tests.T)" for number in ("one", "two", "three"))
GO = "=== RUN   TestA\n--- PASS: TestA (0.00s)\n=== RUN   TestB\n--- {b}: TestB (0.01s)\n{more}\n"
CARGO = "running 2 tests\ntest a::one ... ok\ntest a::two ... {two}\n{more}\n"


@pytest.mark.parametrize(
    ("parser", "log", "f2p", "p2p", "code", "resolved"),
    [
        ("parse_log_django", DJANGO.format(two="ok", more="OK"), TWO, ONE, 0, 1),
        ("parse_log_django", DJANGO.format(two="ok", more=""), TWO, THREE, 0, 1),
        ("parse_log_django", DJANGO.format(two="ok", more=""), THREE, ONE, 0, 0),
        ("parse_log_django", DJANGO.format(two="FAIL", more=""), TWO, ONE, 1, 0),
        (
            "parse_log_django", DJANGO.format(two="FAIL", more="test_two (app.tests.T) ... ok"),
            TWO, ONE, 1, 0,
        ),
        ("parse_log_gotest", GO.format(b="PASS", more="PASS"), "TestB", "TestA", 0, 1),
        ("parse_log_gotest", GO.format(b="PASS", more="FAIL"), "TestB", "TestA", 1, 0),
        ("parse_log_gotest", GO.format(b="FAIL", more="--- PASS: TestB (0.00s)"), "TestB", "TestA", 1, 0),
        ("parse_log_gotest", GO.format(b="PASS", more="--- FAIL: TestC (0.00s)"), "TestB", "TestA", 1, 1),
        ("parse_log_gotest", GO.format(b="PASS", more="panic: out"), "TestB", "TestC", 0, 0),
        ("parse_log_cargo", CARGO.format(two="ok", more="test result: ok."), "a::two", "a::one", 0, 1),
        ("parse_log_cargo", CARGO.format(two="ok", more="error: test failed"), "a::two", "a::one", 101, 0),
        ("parse_log_cargo", CARGO.format(two="FAILED", more="test a::two ... ok"), "a::two", "a::one", 101, 0),
        ("parse_log_jest_json", '{"testResults": [', "a", "b", 0, 0),
    ],
)  # fmt: skip
def test_a_log_needs_an_exit_status_that_fits(
    parser: str, log: str, f2p: str, p2p: str, code: int, resolved: int
) -> None:
    found = judged(parser=parser, log=log.encode(), f2p=(f2p,), p2p=(p2p,), exit_code=code)
    assert found["resolved"] == bool(resolved), found


def test_a_log_without_tests_has_none_that_passed() -> None:
    found = judged(parser="parse_log_gotest", log=b"go: command not found\n", exit_code=127)
    assert (found["passed"], found["ran"], found["resolved"]) == (0, 0, False)


# -- parsers -----------------------------------------------------------------------------------------------------------


def test_which_parsers_there_are() -> None:
    assert check_parser("parse_log_pytest_v2") == "parse_log_pytest_v2"
    assert check_parser("parse_log_pytest_v4") == "parse_log_pytest", "newer ones of datasets' own forks"
    with pytest.raises(TaskError, match="log_parser is 'parse_log_nose', .* set `log_parser` .* parse_log_django"):
        check_parser("parse_log_nose")


def test_which_parsers_read_pytest() -> None:
    assert is_pytest("parse_log_pytest") and is_pytest("parse_log_scikit") and is_pytest("parse_log_matplotlib")
    for other in ("parse_log_django", "parse_log_sympy", "parse_log_gotest", "parse_log_cargo", "parse_log_jest"):
        assert not is_pytest(other)


def test_the_names_are_those_of_swebench() -> None:
    from swebench.harness.log_parsers import PARSER_REGISTRY

    assert verdict._known() == tuple(PARSER_REGISTRY)
    assert read("PASSED t.py::a", "parse_log_pytest") == {"t.py::a": "PASSED"}


def test_without_swebench_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict._known.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HandlerError, match=r"pip install 'rollout-line\[swe\]'"):
        check_parser("parse_log_pytest")
    monkeypatch.undo()
    assert check_parser("parse_log_pytest") == "parse_log_pytest"


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("pytest -rA t.py", "pytest -rA t.py"),
        ("PYTHONPATH=src pytest t.py", 'PYTHONPATH="$rollout_tests":src pytest t.py'),
        ("PYTHONPATH= pytest t.py", "PYTHONPATH= pytest t.py"),
        ("export PYTEST_ADDOPTS='-v'; pytest", "export PYTEST_ADDOPTS='-p plug ''-v'; pytest"),
        ("MYPYTHONPATH=x pytest", "MYPYTHONPATH=x pytest"),
    ],
)
def test_a_command_that_sets_a_variable_keeps_the_plugin(command: str, found: str) -> None:
    assert with_plugin(command, "plug") == found
