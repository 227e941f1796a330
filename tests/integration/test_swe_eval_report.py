"""The plugin that reports on tests, in a real pytest of its own process: what it says of each kind of test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handlers.swe.signed import RANKS, facts_of, records_of
from handlers.swe.test_run import HERE

KEY = bytes(range(32))

TESTS = """
import unittest
import pytest
from product import calls_xfail, raises


class TestUnit(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.fail()
    @unittest.skip("no")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    def test_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)


class TestPlain:
    def test_passes(self): pass
    def test_xfails(self): pytest.xfail("known")


@pytest.fixture
def broken(): raise ValueError
@pytest.fixture
def breaks():
    yield
    raise ValueError

@pytest.mark.parametrize("value", ["a b", "x[0]", "\\u00fc"])
def test_values(value): pass
@pytest.mark.xfail
def test_marked(): assert 0
@pytest.mark.xfail
def test_marked_passes(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass
@pytest.mark.xfail(run=False)
def test_not_run(): pass
@pytest.mark.skip
def test_skipped(): pass
def test_setup(broken): pass
def test_teardown(breaks): pass
def test_fails(): assert 1 == 2
def test_raises(): raises()
def test_product_xfails(): calls_xfail()
def test_patches(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *about: None)
    monkeypatch.setattr("json.dumps", lambda *about: "")
"""
PRODUCT = """
import functools
import pytest
def calls_xfail(): pytest.xfail("known")
def raises(): raise ValueError
def wrapped(function):
    @functools.wraps(function)
    def inner(): return function()
    return inner
"""
WANTED = {
    "TestUnit::test_passes": "PASSED", "TestUnit::test_fails": "FAILED", "TestUnit::test_skipped": "SKIPPED",
    "TestUnit::test_parts": "FAILED", "TestPlain::test_passes": "PASSED", "TestPlain::test_xfails": "XFAIL",
    "test_values[a b]": "PASSED", "test_values[x[0]]": "PASSED", "test_values[\\xfc]": "PASSED",
    "test_marked": "XFAIL", "test_marked_passes": "XPASS", "test_strict": "FAILED", "test_not_run": "XFAIL",
    "test_skipped": "SKIPPED", "test_setup": "ERROR", "test_teardown": "ERROR", "test_fails": "FAILED",
    "test_raises": "FAILED", "test_product_xfails": "SKIPPED", "test_patches": "PASSED",
}  # fmt: skip


def run(folder: Path, tests: str, *words: str, where: str = ".") -> tuple[Any, list[dict[str, Any]], str]:
    """Facts, records and output of pytest with the plugin."""
    grader, place = folder / "grader", folder / "repo"
    for each in (grader, place):
        each.mkdir(exist_ok=True)
    (place / "test_it.py").write_text(tests)
    (place / "product.py").write_text(PRODUCT)
    (place / "sub").mkdir()
    (place / "pytest.ini").write_text("[pytest]\n")
    plugin = (HERE / "pytest_report.py").read_text().replace("handlers.swe.pytest_watch", "watch_x")
    (grader / "report_x.py").write_text(plugin)
    (grader / "watch_x.py").write_bytes((HERE / "pytest_watch.py").read_bytes())
    site = (HERE / "pytest_site.py").read_text().replace("rollout_plugin_name", "report_x")
    (grader / "sitecustomize.py").write_text(site)
    (grader / "key").write_bytes(KEY)
    (grader / "changed").write_bytes(str(place / "product.py").encode())
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{grader}:{place}", "PYTEST_ADDOPTS": "-p report_x"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    done = subprocess.run(command, cwd=place / where, capture_output=True, text=True, env=env)
    assert not (grader / "key").exists(), done
    report = (grader / "report").read_bytes()
    records, wrong = records_of(report, KEY)
    assert wrong == ""
    return facts_of(report, KEY, {}), records, done.stdout + done.stderr


@pytest.mark.parametrize("words", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)])
def test_each_kind_of_test_is_reported_as_pytest_s_summary_names_it(tmp_path: Path, words: list[str]) -> None:
    """Workers of xdist are not used: what they report, their own tests could have written."""
    facts, records, output = run(tmp_path, TESTS, "-rA", *words)
    found = {name.removeprefix("test_it.py::"): status for name, status in facts.statuses.items()}
    expected = found.pop("TestUnit::test_expected")
    assert expected in ("XFAIL", "SKIPPED"), "unittest's own mark"
    assert found == WANTED, output
    assert (facts.forged, facts.unfinished, facts.last) == ("", "", "")
    canaries = [record for record in records if record["kind"] == "canary"]
    assert len(canaries) >= 6 and all(record["got"] == record["wanted"] for record in canaries)
    for name in ("TestPlain::test_passes", "test_values[a b]"):
        assert f"PASSED test_it.py::{name}" in output
    assert re.search(r"^5 failed, 8 passed, .* 2 errors", output, re.MULTILINE), "the grader's own tests don't count"


@pytest.mark.slow
def test_names_are_seen_from_where_pytest_was_started(tmp_path: Path) -> None:
    facts, _, output = run(tmp_path, "def test_a(): pass\n", "-rA", "../test_it.py", where="sub")
    assert facts.statuses == {"../test_it.py::test_a": "PASSED"}, output
    assert "PASSED ../test_it.py::test_a" in output


@pytest.mark.slow
def test_a_pytest_that_a_test_starts_is_left_alone(tmp_path: Path) -> None:
    tests = """
import subprocess, sys
pytest_plugins = "pytester"

def test_process():
    assert subprocess.run([sys.executable, "-m", "pytest", "--version"]).returncode == 0

def test_inside(pytester):
    pytester.makepyfile("def test_x(): assert 0")
    pytester.inline_run().assertoutcome(failed=1)
"""
    facts, records, output = run(tmp_path, tests)
    assert facts.statuses == {"test_it.py::test_process": "PASSED", "test_it.py::test_inside": "PASSED"}, output
    assert facts.forged == "" and sum(record["kind"] == "begin" for record in records) == 1


@pytest.mark.slow
def test_what_tests_and_installed_plugins_do_is_no_forgery(tmp_path: Path) -> None:
    """Decorators of the product, a plugin in the tests' own folder, mocks and a debugger's hook that are taken back."""
    plugin = "def pytest_runtest_setup(item): pass\n\ndef pytest_collection_modifyitems(items): items.reverse()\n"
    tests = """
import functools, sys, unittest.mock
from unittest import mock
import pytest
import product

def twice(function):
    @functools.wraps(function)
    def wrapped(*about, **more):
        function(*about, **more)
        return function(*about, **more)
    return wrapped

@twice
def test_wrapped(): pass

@product.wrapped
def test_product_wraps(): pass

@mock.patch("builtins.open")
def test_mocked(opened): pass

def test_traced():
    before = sys.gettrace()
    sys.settrace(lambda *about: None)
    sys.settrace(before)

exec("def test_made(): pass")
"""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "conftest.py").write_text(plugin)
    facts, _, output = run(tmp_path, tests)
    assert facts.forged == "" and len(facts.statuses) == 5, (facts, output)
    assert set(facts.statuses.values()) == {"PASSED"}, output


@pytest.mark.slow
def test_an_end_without_a_summary_is_not_whole(tmp_path: Path) -> None:
    facts, _, _ = run(tmp_path, "import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n")
    assert facts.unfinished == "the test run ended early, in test_it.py::test_b: it never came to its end"
    assert facts.statuses == {"test_it.py::test_a": "PASSED"}


@pytest.mark.parametrize("name", ["pytest_report.py", "pytest_watch.py", "pytest_site.py"])
def test_what_goes_into_a_sandbox_is_python_3_6(name: str) -> None:
    ast.parse((HERE / name).read_text(), feature_version=(3, 6))


def test_both_sides_know_the_same_statuses() -> None:
    assert set(WANTED.values()) <= set(RANKS)
