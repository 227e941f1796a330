"""Whether two items of answers are equal: by math-verify, and beyond what it reads over (small numbers, bases, times).

Imports math-verify when it is called; to be called as `handlers.equal` is, in a child that is killed at a limit.
"""

from __future__ import annotations

import cmath
import re
from dataclasses import replace
from typing import Any

from handlers import answers

NEVER = 60
"""Seconds after which math-verify's own alarm would ring: our limits come first."""

ELLIPSIS = "..."


def same(gold: str, said: str) -> bool:
    """Whether two items are equal; those with words, an ellipsis, a congruence or colons, as texts alone."""
    if answers.folded(gold) == answers.folded(said):
        return True
    times = [_CLOCK.fullmatch(answers.WRAPPED.sub(r"\1", item)) for item in (gold, said)]
    if times[0] and times[1]:  # no proportions: 6:15 is not 12:30
        (time_a, half_a), (time_b, half_b) = (found.groups() for found in times if found)
        return time_a == time_b and (not half_a or not half_b or half_a.casefold() == half_b.casefold())
    if is_text(gold) or ELLIPSIS in said or _PROPORTION.search(said):
        return False
    bases = [_BASE.findall(item) for item in (gold, said)]
    if all(bases) and bases[0] != bases[1]:
        return False
    from math_verify import verify

    units = _drops_units(gold)
    one, other = parsed(gold, units=units), parsed(said, units=units)
    if one is None or other is None:
        return False
    if verify(one, other, timeout_seconds=NEVER, allow_set_relation_comp=True, raise_on_error=True):
        return _close(one, other, APART)
    return _close(one, other, ROUNDING, exact=False)


APART = 5e-6
"""Relative difference of two numbers beyond which they are not equal. math-verify looks at six decimals alone, in which
all that is smaller than a millionth is zero."""

ROUNDING = 1e-12
"""Relative difference that comes from computing with floats, in numbers so large that six decimals are too many."""


def _close(one: Any, other: Any, apart: float, *, exact: bool = True) -> bool:
    """Whether two numbers differ at most by `apart`, where one of them is a decimal; `exact` for all else."""
    from sympy import Expr, Float

    pair = one, other
    if not all(isinstance(item, Expr) and not item.free_symbols for item in pair) or not any(
        item.has(Float) for item in pair
    ):
        return exact
    try:
        a, b = (complex(item.evalf()) for item in pair)
    except (TypeError, OverflowError):  # math-verify's percent has no value of its own; a number beyond every float
        return exact
    if not (cmath.isfinite(a) and cmath.isfinite(b)):  # no difference says anything then
        return exact
    return abs(a - b) <= apart * max(abs(a), abs(b))


_BASE = re.compile(r"\d\s*_\s*\{?\s*(\d+)")
"""The base that a numeral names: math-verify reads over it."""

_CLOCK = re.compile(r"\s*(\d{1,2}:[0-5]\d)\s*(?:([AaPp])\.?\s?[Mm]\.?)?\s*")
_PROPORTION = re.compile(r":[^:]*:")


def is_text(item: str) -> bool:
    """What is compared by its text alone, as math-verify reads nothing, or something else, out of it."""
    return ELLIPSIS in item or "\\equiv" in item or bool(_PROPORTION.search(item)) or _is_prose(item)


_UNIT_BEHIND = re.compile(r"(?<=[\d})])\s+[A-Za-z%].*$", re.DOTALL)


def _drops_units(gold: str) -> bool:
    """Whether letters that may be units are: not where the right answer has variables ("2d" is no 2, but "2 d" is)."""
    text = _UNIT_BEHIND.sub("", answers.WRAPPED.sub(" ", gold).strip())
    read = parsed(text, units=False) if re.search(r"[A-Za-z]", _COMMANDS.sub(" ", text)) else None
    return not getattr(read, "free_symbols", None)


_COMMANDS = re.compile(r"\\(?:begin|end)\s*\{\w*\*?\}|\\[A-Za-z]+")
_WORDS = re.compile(r"[A-Za-z]{3,}")


def _is_prose(item: str) -> bool:
    """Words that are no formula: compared as text alone."""
    text = answers.WRAPPED.sub(" ", item)
    return len(_WORDS.findall(_COMMANDS.sub(" ", text))) >= 2


_COUNTED = re.compile(r"([-+]?\d[\d.]*)\s+([A-Za-z]{2,}(?:[ -][A-Za-z.]+)*)\.?")
_LARGE = re.compile(
    r"(\d[\d.]*)\s*(?:\\(?:text|mathrm)\s*\{\s*)?(thousand|million|billion|trillion)(?![a-z])(?:\s*\})?"
)
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_AMOUNTS = re.compile(r"hundred|dozen|percent|\bif\b|\bnot\b", re.IGNORECASE)
_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|:|\|)\s*(.*)\\\}")


def parsed(item: str, *, units: bool = True) -> Any:
    """A sympy object, None where math-verify reads none. `units`: letters that may be units are left out."""
    from math_verify import LatexExtractionConfig, parse

    item = _LARGE.sub(lambda found: f"{found[1]}\\cdot 10^{{{_POWERS[found[2]]}}}", item)
    if (counted := _COUNTED.fullmatch(item.strip())) and not _AMOUNTS.search(counted[2]):
        item = counted[1]  # "18 dollars", "3 red apples"
    if builder := _BUILDER.fullmatch(item.strip()):
        item = builder[1]
    usual = LatexExtractionConfig(boxed_match_priority=-1)  # its other way takes any number out of what can't be read
    formula = [replace(usual, normalization_config=replace(usual.normalization_config, units=units))]
    try:
        read = parse(f"${item}$", formula, parsing_timeout=NEVER, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # its parser raises anything at all on text that is no mathematics
        return None
    return next((one for one in read if not isinstance(one, str)), None)
