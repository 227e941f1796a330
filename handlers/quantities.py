"""Numbers with units: "3.0e8 m/s" is "300000 km/s", "3 \\times 10^{8}" is 3e8.

Reading takes time that grows with the text, but for a number that is a formula ("2\\pi"): that one is evaluated by
sympy, so call it in a child (`Context.compute`).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from handlers import answers, items
from handlers.units import Unit, unit


class Quantity(NamedTuple):
    """`low` is `high` but for a range. `unit` is None where none is said; `rest` is the text behind."""

    low: float
    high: float
    unit: Unit | None
    rest: str

    def within(self, gold: Quantity, relative: float, absolute: float) -> bool:
        """Whether it lies in the gold's range, give or take the wider of the two tolerances; as base units."""
        (low, high), (least, most) = _based(self), _based(gold)
        give = max(absolute * (gold.unit.factor if gold.unit else 1.0), relative * max(abs(least), abs(most)))
        give += 1e-12 * max(abs(least), abs(most))
        return bool(least - give <= low and high <= most + give)


def _based(quantity: Quantity) -> tuple[float, float]:
    one = quantity.unit or Unit()
    return quantity.low * one.factor + one.zero, quantity.high * one.factor + one.zero


_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|\(?([-+]?\d{1,3})\)?)"
_NUMBER = re.compile(
    r"([-+]?)\s*(?:((?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400})(?:\.\d{0,400})?|\.\d{1,400})"
    rf"(?:\s*(?:\\times|\\cdot|\*|x|X)\s*{_TEN}|[eE]([-+]?\d{{1,3}})(?![\d.]))?|{_TEN})"
)
_FRACTION = re.compile(
    r"([-+]?)\s*(?:\\frac\s*\{\s*([-+]?[\d.]{1,20})\s*\}\s*\{\s*([\d.]{1,20})\s*\}|(\d{1,20})\s*/\s*(\d{1,20})(?![\d.]))"
)
_START = re.compile(r"(?<![\w.^{\\/])[-+]?\s?(?:\d|\.\d|\\frac|\\sqrt|\\pi)")
_SPREAD = re.compile(r"\s*\\pm\s*[\d.]{1,20}(?:\s*\\times\s*10\s*\^\s*\{?-?\d{1,3}\}?)?")
_TO = re.compile(r"\s*(?:to|-{1,2})\s*(?=[-+.\d])")
_GOES_ON = re.compile(
    r"\s*(?:\\(?:sqrt|pi|cdot|times|ln|exp)(?![a-z])|\^(?!\s*\{?\s*\\?circ)|[-+*/]\s*\\|[+*]\s*[\d(])"
)
_WRAP = re.compile(r"\\(?:text|mathrm|rm|textrm|operatorname|unit|si|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def tidy(text: str) -> str:
    """A quantity's text without LaTeX's wrapping."""
    text = answers.bare(text.replace("\\,", " ").replace("\\;", " ").replace("\\ ", " "))
    for _ in range(2):
        text = _WRAP.sub(lambda found: f" {found[1]} ", text)
    return _SIGNS.sub(lambda found: {"mu": "\u00b5", "Omega": "\u03a9"}[found[1]], text).replace("{}", "").strip()


_SIGNS = re.compile(r"\\(mu|Omega)(?![a-z])\s*")


def number(text: str, at: int = 0) -> tuple[float, int] | None:
    """The number that begins at `at`, and where it ends."""
    found = _FRACTION.match(text, at)
    if found:
        try:
            value = float(found[2] or found[4]) / float(found[3] or found[5])
        except (ValueError, ZeroDivisionError):
            return None
        return (-value if found[1] == "-" else value), found.end()
    found = _NUMBER.match(text, at)
    if found is None:
        return None
    exponent = next((group for group in found.groups()[2:] if group), "0")
    return float(f"{found[1]}{(found[2] or '1').replace(',', '')}e{int(exponent)}"), found.end()


def read(text: str, *, last: bool = False) -> Quantity | None:
    """The first quantity of a text, or the `last`; what stands before an equals sign does not count."""
    text = tidy(text)
    text = text[text.rfind("=") + 1 :]
    found: Quantity | None = None
    at = 0
    for start in [match.start() for match in _START.finditer(text)][:100]:
        one = _at(text, start) if start >= at else None
        if one is not None:
            found, at = one, len(text) - len(one.rest)
        if not last:  # a formula that can't be evaluated is no reason to look for a number inside it
            break
    return found


def _at(text: str, start: int) -> Quantity | None:
    first = number(text, start)
    if first is None or _GOES_ON.match(text, first[1]):
        return _evaluated(text[start:])
    low, at = first
    spread = _SPREAD.match(text, at)
    inner, behind = unit(text, spread.end() if spread else at)
    high, to = low, _TO.match(text, behind)
    second = number(text, to.end()) if to else None
    if second is not None and second[0] > low:
        high, at = second
        outer, behind = unit(text, at)
        inner = outer if outer is not None else inner
    return Quantity(low, high, inner, text[behind:]) if math.isfinite(low) and math.isfinite(high) else None


_FORMULA_ENDS = re.compile(r"(?<![A-Za-z\\])\s+(?=[A-Za-z%])|\s(?=\\circ)")


def _evaluated(text: str) -> Quantity | None:
    """A formula without variables as a number; its unit stands behind a blank."""
    ends = _FORMULA_ENDS.search(text)
    formula, behind = (text[: ends.start()], ends.start()) if ends else (text, len(text))
    value = items.parsed(formula)
    try:
        amount = float(value.evalf()) if value is not None and not value.free_symbols else math.nan
    except MemoryError:
        raise
    except Exception:  # sympy raises anything at all on what is no number
        return None
    found, behind = unit(text, behind)
    return Quantity(amount, amount, found, text[behind:]) if math.isfinite(amount) else None
