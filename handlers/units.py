"""Units as people and models write them ("m/s", "m s^{-1}", "\\text{ kJ}/(mol K)"). What they are worth is sympy's.

Reading takes time that grows with the text. sympy is imported with the first unit.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

Dimensions = tuple[tuple[str, float], ...]


class Unit(NamedTuple):
    """How much of the base units one of it is, and of which; `zero`: where its scale begins, for °C and °F."""

    factor: float = 1.0
    dimensions: Dimensions = ()
    zero: float = 0.0


_STEP = re.compile(r"\s*(?:(?P<by>\\cdot|\\times|\*|\.(?=[A-Za-z]))|(?P<per>/|per\b)|(?P<open>\()|(?P<close>\)))\s*")
_NAME = re.compile(
    r"\s*(\^\s*\{?\s*\\circ\s*\}?\s*[CFK]?(?![A-Za-z])|\\%|%|\\[A-Za-z]+|[A-Za-z\u00b5\u03bc\u03a9\u212b]+)"
)
_POWER = re.compile(r"\s*(?:\^|\*\*)\s*\{?\s*\(?([-+]?\d)\)?\s*\}?|(?<=[A-Za-z])([-+]?[1-4])(?![\d.])")
_WRITTEN = re.compile(r"[\s{}\\^]")


def unit(text: str, at: int = 0) -> tuple[Unit | None, int]:
    """The unit that begins at `at`, and where it ends; None, and where it began, where what stands there is none."""
    factor, zero, end, count = 1.0, 0.0, at, 0
    total: dict[str, float] = {}
    sign, bracket = 1, False
    while True:
        step = _STEP.match(text, at)
        if step and step["close"]:
            if not bracket:
                break
            sign, bracket, at = 1, False, step.end()
            end = at
            continue
        if step:
            sign = -1 if step["per"] else sign  # what is in brackets behind a slash is divided by, all of it
            bracket, at = bracket or bool(step["open"]), step.end()
            continue
        found = _NAME.match(text, at)
        one = named(found[1]) if found else None
        if found is None or one is None:
            break
        raised = _POWER.match(text, found.end())
        power = sign * int(raised[1] or raised[2] if raised else 1)
        factor *= one.factor**power if abs(power) < 10 else 1.0
        for name, exponent in one.dimensions:
            total[name] = total.get(name, 0.0) + power * exponent
        zero = one.zero if not count and power == 1 else 0.0
        count += 1
        at = end = raised.end() if raised else found.end()
        sign = sign if bracket else 1
    if not count:
        return None, end
    return Unit(factor, tuple(sorted((name, power) for name, power in total.items() if power)), zero), end


def named(name: str) -> Unit | None:
    """The unit of this name or symbol; of long names a plural and capital letters are the same."""
    plain, known = _WRITTEN.sub("", name), _units()
    low = plain.lower() if len(plain) > 3 else plain
    singular = low[:-1] if len(low) > 3 and low.endswith("s") else low
    return known.get(plain) or known.get(low) or known.get(singular)


_PREFIXED = (
    "m", "g", "s", "A", "K", "mol", "cd", "Hz", "N", "Pa", "J", "W", "C", "V", "F", "S", "Wb", "T", "H", "L", "l",
    "eV", "Bq", "Gy", "Sv", "bar", "cal", "Wh", "pc", "M", "\u03a9", "ohm", "meter", "metre", "gram", "second",
    "joule", "watt", "newton", "pascal", "volt", "hertz", "liter", "litre", "ampere", "mole", "calorie",
    "electronvolt", "parsec",
)  # fmt: skip

_SAME = {
    "sec": "s", "hr": "hour", "min": "minute", "in": "inch", "lb": "pound", "lbs": "pound", "metre": "meter",
    "litre": "liter", "\u03a9": "ohm", "\u212b": "angstrom", "AA": "angstrom", "amp": "ampere",
    "amps": "ampere", "u": "Da", "yr": "year", "d": "day", "circ": "deg", "%": "percent",
}  # fmt: skip
_MADE: dict[str, tuple[float, dict[str, int]]] = {
    "cal": (4.184, {"J": 1}), "calorie": (4.184, {"J": 1}), "dyn": (1e-5, {"N": 1}), "dyne": (1e-5, {"N": 1}),
    "erg": (1e-7, {"J": 1}), "hp": (745.69987, {"W": 1}), "gallon": (3.785411784, {"L": 1}), "Wh": (3600.0, {"J": 1}),
    "oz": (28.349523125, {"g": 1}), "ounce": (28.349523125, {"g": 1}), "rev": (360.0, {"deg": 1}),
    "rpm": (6.0, {"deg": 1, "s": -1}), "mph": (1.0, {"mile": 1, "hour": -1}), "kph": (1.0, {"km": 1, "hour": -1}),
    "knot": (1.0, {"nmi": 1, "hour": -1}), "M": (1.0, {"mol": 1, "L": -1}), "molar": (1.0, {"mol": 1, "L": -1}),
    "ppm": (1e-4, {"percent": 1}), "ppb": (1e-7, {"percent": 1}), "gauss": (1e-4, {"T": 1}),
    "week": (7.0, {"day": 1}),
    "pc": (3.0856775814913673e16, {"m": 1}), "parsec": (3.0856775814913673e16, {"m": 1}), "Sv": (1.0, {"Gy": 1}),
    "acre": (4046.8564224, {"m": 2}), "Ci": (3.7e10, {"Bq": 1}), "lbf": (4.4482216152605, {"N": 1}),
}  # fmt: skip
"""What sympy has no name for: so many of these."""

_CONSTANTS = frozenset({"G", "R", "Z0", "e0", "u0", "me", "gee", "gees"})


@functools.cache
def _units() -> dict[str, Unit]:
    """All names, with their prefixes. The speed of light and the electronvolt are among them, no other constants."""
    from sympy.physics import units as known
    from sympy.physics.units.prefixes import PREFIXES
    from sympy.physics.units.systems import SI

    system = SI.get_dimension_system()
    found: dict[str, Unit] = {}
    for name, one in vars(known).items():
        if not isinstance(one, known.Quantity) or "planck" in name or "constant" in name or name in _CONSTANTS:
            continue
        powers = system.get_dimensional_dependencies(SI.get_quantity_dimension(one))
        dimensions = tuple(sorted((str(power.name), float(count)) for power, count in powers.items()))
        found[name] = Unit(float(SI.get_quantity_scale_factor(one)), dimensions)
    for names, zero, factor in (("circC degC celsius", 273.15, 1.0), ("circF degF fahrenheit", 459.67 * 5 / 9, 5 / 9)):
        found |= dict.fromkeys(names.split(), Unit(factor, found["K"].dimensions, zero))
    found |= {name: found[same] for name, same in _SAME.items()}
    for name, (count, parts) in _MADE.items():
        factor, total = count, dict[str, float]()
        for part, power in parts.items():
            factor *= found[part].factor ** power
            for base, exponent in found[part].dimensions:
                total[base] = total.get(base, 0.0) + exponent * power
        found[name] = Unit(factor, tuple(sorted((base, power) for base, power in total.items() if power)))
    prefixes = {str(symbol): float(prefix.scale_factor) for symbol, prefix in PREFIXES.items()}
    prefixes |= {str(prefix.name): float(prefix.scale_factor) for prefix in PREFIXES.values()}
    prefixes |= dict.fromkeys(("u", "\u00b5", "\u03bc"), 1e-6)
    for name in _PREFIXED:
        for prefix, scale in prefixes.items():
            found.setdefault(prefix + name, Unit(scale * found[name].factor, found[name].dimensions))
    return found
