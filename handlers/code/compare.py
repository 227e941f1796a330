"""What came out of one test against what is right: text as judges compare it, what functions return as JSON values.

Plain functions, called in a child process: what a policy's program printed is read nowhere else.
"""

from __future__ import annotations

import json
import math
from typing import Any

CLOSE = 1e-6
"""Relative and absolute difference up to which a float that a function returned is right, unless the task says."""

DIGITS = 4000
"""Longer integers are compared by their digits: Python would take quadratic time to read them."""


def same_text(got: str, right: str, checker: str, tolerance: float) -> bool:
    """`lines`: blanks between the words of a line and empty lines don't count; `tokens`: nor do line ends; `exact`:
    everything does. With a tolerance above 0, words that are numbers may differ by it, relative or absolute."""
    if got == right:
        return True
    if checker == "exact":
        return False
    if checker == "tokens":
        return _same_words(got.split(), right.split(), tolerance)
    lines, wanted = ([words for line in text.split("\n") if (words := line.split())] for text in (got, right))
    return len(lines) == len(wanted) and all(_same_words(*pair, tolerance) for pair in zip(lines, wanted, strict=True))


def same_value(got: Any, right: Any, tolerance: float) -> bool:
    """Whether two JSON values are the same: 1 is 1.0 but not true, NaN is NaN, -0.0 is 0; floats differ a little."""
    if isinstance(got, bool) or isinstance(right, bool) or got is None or right is None:
        return got is right
    if isinstance(got, int | float) and isinstance(right, int | float):
        return _close(got, right, tolerance or CLOSE if isinstance(right, float) else tolerance)
    if isinstance(got, list) and isinstance(right, list):
        return len(got) == len(right) and all(same_value(*pair, tolerance) for pair in zip(got, right, strict=True))
    if isinstance(got, dict) and isinstance(right, dict):
        return got.keys() == right.keys() and all(same_value(got[key], right[key], tolerance) for key in right)
    return type(got) is type(right) and bool(got == right)


def read_value(text: str) -> Any:
    """A JSON value. Raises ValueError for what is none, RecursionError for one that is too deep."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < DIGITS else digits)


def same(fn: bool, got: str, rights: list[str], checker: str, tolerance: float) -> bool:
    """Whether an output is one of the right ones; what is no JSON value is not."""
    if not fn:
        return any(same_text(got, right, checker, tolerance) for right in rights)
    try:
        value = read_value(got)
        return any(same_value(value, read_value(right), tolerance) for right in rights)
    except (ValueError, RecursionError):
        return False


def _same_words(got: list[str], right: list[str], tolerance: float) -> bool:
    if len(got) != len(right):
        return False
    return all(a == b or (tolerance > 0 and _same_number(a, b, tolerance)) for a, b in zip(got, right, strict=True))


def _same_number(got: str, right: str, tolerance: float) -> bool:
    try:
        return _close(float(got), float(right), tolerance)
    except ValueError:
        return False


def _close(got: float, right: float, tolerance: float) -> bool:
    if got == right or (got != got and right != right):
        return True
    try:
        return math.isclose(got, right, rel_tol=tolerance, abs_tol=tolerance) and math.isfinite(got - right)
    except OverflowError:  # an integer beyond every float
        return False
