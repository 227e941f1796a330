"""Where the final answer stands in what a policy wrote, and its spelling made plain: for `math` and `stem`.

Only text is looked at here, in time that grows with its length: no answer is long enough to keep a grader busy.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

TAIL = 20_000
"""Characters of a reply that are looked at, from its end."""

LONGEST = 2_000
"""Characters of an answer; no right one is longer."""

DEEPEST = 30
"""Brackets inside one another in an answer."""


class Said(NamedTuple):
    """A final answer: its text ("" for none), and where it stood or why there is none."""

    text: str
    where: str


def final(reply: str, *, whole: bool = False) -> Said:
    """The last box, else what "the answer is" last says, else the last line.

    Boxes that only a comma or "and" parts are one. `whole`: of a sentence without a box all is taken, not its formula
    or its number alone.
    """
    reply = reply[-TAIL:]
    boxes = _boxes(reply)
    if boxes is None:
        return Said("", "the last \\boxed{ is never closed")
    if boxes:
        return _checked(boxes, "the last \\boxed{}")
    marks = list(_MARK.finditer(reply))
    if marks:
        lines = [line.strip() for line in reply[marks[-1].end() :].splitlines()]
        rest = next((line for line in lines if line.strip("*$ ")), "")
        return _checked(_phrase(rest, last=False, whole=whole), f"after {marks[-1].group().strip()!r}")
    lines = [line.strip() for line in reply.splitlines() if any(map(str.isalnum, line))]
    return (
        _checked(_phrase(lines[-1], last=True, whole=whole), "the last line")
        if lines
        else Said("", "the reply says nothing")
    )


def _checked(text: str, where: str) -> Said:
    if len(text) > LONGEST:
        return Said("", f"{where} holds {len(text)} characters: no answer is that long")
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return Said("", f"{where} holds {deepest} brackets inside one another: no answer does")
    return Said(text.strip(), where if text.strip() else f"{where} is empty")


# -- boxes -----------------------------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?=\d))")
_BETWEEN = re.compile(r"[\s$*]*(?:\\[()\[\]])?[\s$*]*(?:,|;|and|or|, and|, or)[\s$*]*(?:\\[()\[\]])?[\s$*]*")


def _boxes(reply: str) -> str | None:
    """What the last box holds, with those right before it; "" without any, None where the last one never closes.

    Empty ones are passed over: they quote the question.
    """
    found: list[tuple[int, int, str]] = []
    at = 0
    while match := _BOX.search(reply, at):
        if match.group().endswith("{"):
            end = _closing(reply, match.end())
            if end is None:
                return None
            inside = reply[match.end() : end]
            at = end + 1
        else:
            inside = _DIGITS.match(reply, match.end()).group()  # type: ignore[union-attr]
            at = match.end() + len(inside)
        if inside.strip():
            found.append((match.start(), at, inside))
    if not found:
        return ""
    joined = [found[-1][2]]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=False):
        if not _BETWEEN.fullmatch(reply[before[1] : after[0]][:40]) or after[0] - before[1] > 40:
            break
        joined.insert(0, before[2])
    return ", ".join(joined)


_DIGITS = re.compile(r"[\d.,/]+")


def _closing(text: str, start: int) -> int | None:
    """Where the brace that is open at `start` closes."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return at
        at += 1
    return None


# -- answers without a box -------------------------------------------------------------------------------------------

_MARK = re.compile(
    r"\banswers?\b(?:[^\n.:=]{0,60}?\b(?:is|are)\b|[^\n.:=]{0,60}?[:=])[\s:*]*|\banswer\b\W*\n+|<answer>", re.IGNORECASE
)
_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_JOIN = re.compile(r"[\s*]*(?:,|;|,?\s*and|,?\s*or)[\s*]*")
_AND_WORDS = re.compile(r"\s*,?\s*(?:and|or)\b")
_SENTENCE = re.compile(r"[.!?](?=\s+[A-Z]|\s*$)")
NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?"
    r"(?:\s*/\s*\d+(?:\.\d+)?)?(?:\s*\\?%)?"
)


def _phrase(line: str, *, last: bool, whole: bool) -> str:
    """The answer in a line of prose: its (first, or `last`) formula; a number; else, or if `whole`, its sentence."""
    line = _HASHES.sub("", line.replace("</answer>", "").strip().strip("*")).strip()
    line = plain_characters(line.replace("\\$", ""))
    spans = [(match.start(), match.end(), match.group().strip("$")) for match in _MATH.finditer(line)]
    if spans and not whole:
        groups: list[list[tuple[int, int, str]]] = [[spans[0]]]
        for before, after in itertools.pairwise(spans):
            if _JOIN.fullmatch(line[before[1] : after[0]]):
                groups[-1].append(after)
            else:
                groups.append([after])
        gaps = [line[a[1] : b[0]] for a, b in itertools.pairwise(spans)]
        if not _words(line[: spans[0][0]]) and any(_AND_WORDS.match(gap) and _words(gap) for gap in gaps):
            return line  # formulas and words belong together: "$p=5$ and all primes $p > 7$"
        return ", ".join(span[2] for span in groups[-1 if last else 0])
    ends = [match.start() for match in _SENTENCE.finditer(line)]
    sentence = line[: ends[0]] if ends and not last else line.rstrip(".!?")
    numbers = [match.group().strip() for match in NUMBER.finditer(sentence)]
    if _words(sentence) and numbers and not whole:
        return numbers[-1 if last else 0]
    return sentence


_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")


def _words(text: str) -> list[str]:
    """The words of prose in it: no commands, and no "and"."""
    return [word for word in _WORD.findall(_COMMAND.sub(" ", text)) if word.lower() not in ("and", "or", "sqrt", "pi")]


# -- spelling --------------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FIGURE DASH}": "-", "\N{FULLWIDTH COMMA}": ",",
        "\N{MULTIPLICATION SIGN}": r"\times ", "\N{MIDDLE DOT}": r"\cdot ", "\N{DOT OPERATOR}": r"\cdot ",
        "\N{DIVISION SIGN}": r"\div ", "\N{GREEK SMALL LETTER PI}": r"\pi ", "\N{INFINITY}": r"\infty ",
        "\N{LESS-THAN OR EQUAL TO}": r"\le ", "\N{GREATER-THAN OR EQUAL TO}": r"\ge ", "\N{PLUS-MINUS SIGN}": r"\pm ",
        "\N{NOT EQUAL TO}": r"\ne ", "\N{UNION}": r"\cup ", "\N{INTERSECTION}": r"\cap ", "\N{DEGREE SIGN}": r"^\circ ",
        "\N{ELEMENT OF}": r"\in ", "\N{IDENTICAL TO}": r"\equiv ", "\N{HORIZONTAL ELLIPSIS}": r"\ldots ",
        "\N{FRACTION SLASH}": "/", "\N{DIVISION SLASH}": "/", "\N{ASTERISK OPERATOR}": "*",
        "\N{SUPERSCRIPT TWO}": "^2", "\N{SUPERSCRIPT THREE}": "^3", "\N{SUPERSCRIPT ONE}": "^1",
        "\N{VULGAR FRACTION ONE HALF}": r"\frac{1}{2}", "\N{VULGAR FRACTION ONE THIRD}": r"\frac{1}{3}",
        "\N{VULGAR FRACTION TWO THIRDS}": r"\frac{2}{3}", "\N{VULGAR FRACTION ONE QUARTER}": r"\frac{1}{4}",
        "\N{VULGAR FRACTION THREE QUARTERS}": r"\frac{3}{4}", "\N{VULGAR FRACTION ONE EIGHTH}": r"\frac{1}{8}",
        "\N{VULGAR FRACTION ONE FIFTH}": r"\frac{1}{5}", "\N{VULGAR FRACTION ONE SIXTH}": r"\frac{1}{6}",
        "\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ", "\N{ZERO WIDTH SPACE}": "",
    }
)  # fmt: skip
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a"
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_LOWERED = str.maketrans(_RAISED, "0123456789-+")
_ROOT = re.compile("\N{SQUARE ROOT}" r"\s*(?:\{([^{}]*)\}|\(([^()]*)\)|([\w.]+))")
_CALLED = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_SPACING = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|quad\b|qquad\b|displaystyle\b|left\b(?!arrow)|right\b(?!arrow)|big[lr]?\b|Big[lr]?\b)"
)
_DELIMITERS = re.compile(r"\$|(?<!\\)\\[()\[\]]")
_RAISED_BY = re.compile(r"(?<=[\w)])\*\*(?=[\w(-])")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_PERIOD = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_POWER_OF_TEN = re.compile(r"(?<![\w.\\^{])(-?\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?!\w)")
_MIXED = re.compile(r"(?<![\d.,/^])(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\d.])")
_BOARD = re.compile(r"\\mathbb\s*([A-Z])")
_HASHES = re.compile(r"^\s*#{2,}\s*(?=\S)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?![\d ]*\d)")


def plain_characters(text: str) -> str:
    """Unicode's signs as LaTeX and ASCII."""
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2] or found[3]}}}", text)
    text = _RAISED_RUN.sub(lambda found: f"^{{{found.group().translate(_LOWERED)}}}", text)
    return text.translate(_CHARACTERS)


def bare(text: str) -> str:
    """One answer as LaTeX without delimiters, spacing, money signs and full stop."""
    text = plain_characters(text).replace("{,}", ",").replace("\\$", "")
    text = _SPACING.sub(lambda found: " " if found.group() == "\\ " or "quad" in found.group() else "", text)
    text = (
        _RAISED_BY.sub("^", _DELIMITERS.sub("", text))
        .replace("**", "")
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
    text = text.replace("~", " ").replace("\\cfrac", "\\frac").replace("\\varnothing", "\\emptyset")
    text = _PI.sub(r"\\pi ", _CALLED.sub(r"\\sqrt{\1}", text))
    text = _POWER_OF_TEN.sub(r"\1\\cdot 10^{\2}", _PERIOD.sub(_fraction, text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _BOARD.sub(r"\\mathbb{\1}", text))
    text = _SPACED_THOUSANDS.sub(lambda found: found.group().replace(" ", ""), text)
    return text.strip().rstrip(".,;").strip()


def _fraction(found: re.Match[str]) -> str:
    """A decimal with a period as a fraction."""
    whole, first, period = found[1], found[2], found[3]
    ones = int(whole + first + period) - int(whole + first or "0")
    return f"\\frac{{{ones}}}{{{'9' * len(period) + '0' * len(first)}}}"


WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox|boxed|fbox)\s*\{([^{}]*)\}")


def unwrapped(text: str) -> str:
    """Without the fonts and boxes around words, three deep."""
    for _ in range(3):
        text = WRAPPED.sub(r"\1", text)
    return text


_APART = re.compile(r"(?<=\d)\s+(?=\d)")
_MOD = re.compile(r"\(?\\?p?b?mod\s*\{?\s*(\w+)\s*\}?\)?")


def folded(text: str) -> str:
    """For the comparison of answers as texts: no spaces, no font, words in small letters."""
    text = unwrapped(bare(text))
    text = "".join(_APART.sub("|", _MOD.sub(r"(mod\1)", text)).split())
    return text.casefold() if len(text) > 2 and "\\" not in text else text


_ANOTHER = re.compile(r"(?<![A-Za-z])(?:\(?[A-Z][).:](?=\s|$)|\([a-z]\))|\b(?:or|and)\s+\(?[A-Z]\)?$|,\s*\(?[A-Z]\)?$")
_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*(?:\)|[.:](?=\s|$)|$)")


def letter(text: str) -> str:
    """The choice that an answer names by its letter ("B", "(B)", "B. 12 m"); "" where it names none, or two."""
    text = unwrapped(bare(text))
    found = _LETTER.match(text.strip().strip("{}"))
    if found is None or (found[1].islower() and len(text.strip("().{} ")) > 1):
        return ""
    if _ANOTHER.search(text.strip(), found.end()):
        return ""
    return found[1].upper()
