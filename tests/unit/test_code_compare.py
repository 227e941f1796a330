"""Outputs compared: printed text as judges do it, returned values as JSON; records that only the runner can make."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

import pytest

from handlers.code.compare import same
from handlers.code.records import cut, graded


@pytest.mark.parametrize(
    ("got", "right", "checker", "tolerance", "is_same"),
    [
        ("3\n", "3", "lines", 0, True),
        ("3  \r\n\n\n", "3\n", "lines", 0, True),
        ("1  2\n3", "1 2\n3\n", "lines", 0, True),
        ("1 2 3", "1 2\n3", "lines", 0, False),
        ("1 2 3", "1 2\n3", "tokens", 0, True),
        ("12", "1 2", "tokens", 0, False),
        ("3", "3\n", "exact", 0, False),
        ("3\n", "3\n", "exact", 0, True),
        ("", "", "lines", 0, True),
        ("", "3", "lines", 0, False),
        ("YES", "Yes", "lines", 0, False),
        ("3.0", "3", "lines", 0, False),
        ("0.33333", "0.333333", "lines", 0, False),
        ("0.33333 a", "0.333333 a", "lines", 1e-4, True),
        ("0.33333", "0.333333", "lines", 1e-7, False),
        ("1000001", "1000000", "lines", 1e-5, True),
        ("nan", "3", "lines", 1, False),
        ("inf", "3", "lines", 1, False),
        ("x", "3", "lines", 1, False),
        ("1e999", "inf", "lines", 1e-4, True),
    ],
)
def test_printed_text(got: str, right: str, checker: str, tolerance: float, is_same: bool) -> None:
    assert same(False, got, [right], checker, tolerance) == is_same


@pytest.mark.parametrize(
    ("got", "right", "is_same"),
    [
        ("null", "null", True),
        ("", "null", False),
        ("0", "null", False),
        ("1", "1.0", True),
        ("true", "1", False),
        ("1", "true", False),
        ("false", "null", False),
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("2.9999999", "3", False),
        ("-0.0", "0", True),
        ("NaN", "NaN", True),
        ("NaN", "1.0", False),
        ("Infinity", "1e300", False),
        ("Infinity", "Infinity", True),
        ("[1, [2, 3]]", "[1, [2, 3]]", True),
        ("[1, 2]", "[2, 1]", False),
        ("[1]", "1", False),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1.0}', True),
        ('{"a": 1}', '{"a": 1, "b": 2}', False),
        ('"3"', "3", False),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 5000, "1.5", False),
        ("1" * 400, "1.5", False),
        ("[" * 100_000, "1", False),
        ("{", "1", False),
    ],
)
def test_returned_values(got: str, right: str, is_same: bool) -> None:
    assert same(True, got, [right], "lines", 0) == is_same


def test_any_right_output_will_do() -> None:
    assert same(False, "b", ["a", "b"], "lines", 0) and not same(False, "c", ["a", "b"], "lines", 0)
    assert same(True, "null", ['""', "null"], "lines", 0)


SECRET = "ab" * 32


def record(number: int, secret: str = SECRET, **told: Any) -> bytes:
    data = json.dumps(told).encode()
    digest = hmac.new(bytes.fromhex(secret), struct.pack(">Q", number) + data, hashlib.sha256).digest()
    return struct.pack(">I", len(data)) + digest + data


def ended(number: int, output: str, **about: Any) -> bytes:
    told = {"kind": "test", "how": "ended", "code": 0, "seconds": 0.1, "cpu": 0.1, "output": output, "stderr": ""}
    return record(number, **{**told, **about})


def test_records_are_cut_where_they_are_whole() -> None:
    data = ended(0, "3") + ended(1, "5")
    for size in range(len(data) + 1):
        records, taken = cut(data[:size])
        assert b"".join(records) == data[:taken] and len(records) == (size >= len(ended(0, "3"))) + (size == len(data))
    lie = ended(0, "3") + b"\xff" * 100
    records, taken = cut(lie)
    assert taken == len(lie) and graded(records, SECRET, 0, [["", "1", ["3"]]] * 2, "lines", 0)[1] == {"kind": "forged"}


def test_only_the_runner_makes_records() -> None:
    tests: list[list[Any]] = [["", "1", ["3"]], ["", "2", ["5"]]]
    said = graded([record(0, kind="ready"), ended(1, "3"), ended(2, "6")], SECRET, 0, tests, "lines", 0)
    assert [item.get("passed") for item in said] == [None, True, False]
    assert (said[2]["why"], said[2]["got"], said[2]["expected"]) == ("wrong output", "6", "5")
    for forged in (ended(1, "5", secret="00" * 32), ended(2, "5"), ended(0, "5"), b"\0\0\0\2" + b"x" * 32 + b"{}"):
        assert graded([forged], SECRET, 1, tests, "lines", 0) == [{"kind": "forged"}]


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"how": "exit", "code": 1}, "failed (exit code 1)"),
        ({"how": "signal", "code": -11}, "killed by signal 11"),
        ({"how": "cpu"}, "over the limit of CPU time, after 0.1 s of it"),
        ({"how": "wall"}, "still running after 0.1 s"),
        ({"how": "output"}, "printed too much"),
        ({"how": "silent"}, "before the function returned"),
    ],
)
def test_what_did_not_end_well_fails_whatever_it_printed(about: dict[str, Any], why: str) -> None:
    (said,) = graded([ended(0, "3", **about)], SECRET, 0, [["", "1", ["3"]]], "lines", 0)
    assert not said["passed"] and why in said["why"]
