"""Ways in which a policy may write down a right answer of competition mathematics."""

from __future__ import annotations

import re
from fractions import Fraction

from handlers.answers import bare


def spellings(gold: str) -> list[str]:
    """Replies that end with this answer, each in another spelling; the first one as it stands, in a box."""
    text = bare(gold)
    wide = text.replace("\\frac", "\\dfrac").replace("(", "\\left(").replace(")", "\\right)")
    found = [f"So \\boxed{{{text}}}.", f"The final answer is ${text}$.", f"It is\n$$\\boxed{{{wide}}}$$"]
    if re.fullmatch(r"-?\d+", text):
        found += [f"\\boxed{{{int(text):,}}}", f"The answer is {int(text):,}.", f"\\boxed{{{text}.0}}"]
        found += [f"Thus x = {text}", f"**Answer:** {text}", f"\\boxed{{{text}\\text{{ cm}}}}"]
        found += [f"\\boxed{{{text.replace('-', chr(0x2212))}}}"]
        return found
    fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text)
    if fraction:
        sign, above, below = fraction.groups()
        value = float(Fraction(int(above), int(below)))
        found += [f"The answer is {sign}{above}/{below}.", f"\\boxed{{{sign}{value:.12f}}}"]
        found += [f"\\boxed{{\\frac{{{sign}{above}}}{{{below}}}}}"]
        return found
    return [*found, f"\\boxed{{ {text.replace('+', ' + ').replace(',', ' , ')} }}"]
