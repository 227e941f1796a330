"""Whether two answers are the same mathematics: lists are taken apart here, their items compared in `handlers.items`.

Imports math-verify when it is called. What a policy wrote can keep sympy busy for ever, eat memory, or kill the
process: call this in a child that is killed at a limit (`Context.compute`).
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from handlers import answers
from handlers.items import ELLIPSIS, is_text, parsed, same
from pipeline.errors import GraderError, TaskError

CPU_SECONDS = 1.5
"""CPU time of one comparison, which is the same on a busy machine. A second later the kernel ends the process: no
exception reaches what computes in C."""

MEMORY = 1 << 30
"""Bytes of address space that a check may take beyond what the process has."""

MOST_ITEMS = 64
"""Items of an answer that is a list."""

PROBE = "\\sqrt{7.3125}"
"""What a right answer is compared with to see how long that takes."""

GOLD_SECONDS = 1.0
"""CPU time that reading the right answer, and comparing it with itself, may take."""


class TooSlow(BaseException):
    """The CPU time is over. No Exception: sympy catches those wherever it likes."""


def check_gold(expected: str) -> str:
    """The right answer as it is read. Raises TaskError where it can't be, or takes too long by itself."""
    try:
        with limited(GOLD_SECONDS):
            read = _items_of_gold(expected)
            for item in read:
                same(item, PROBE)
    except (TooSlow, MemoryError):
        raise TaskError(f"the right answer {expected!r:.200} takes too long to compare: write it simpler") from None
    return ", ".join(read)


def compare(expected: str, answer: str) -> dict[str, Any]:
    """{"correct": bool, "read": the answer as it was read, "why": a sentence}; raises nothing for what `answer` is.

    `answer` is the final answer alone (`answers.final`), not the reply.
    """
    chosen = answers.letter(expected)
    if chosen and chosen == answers.letter(answer):
        return {"correct": True, "read": chosen, "why": f"the same choice, {chosen}"}
    if answers.folded(expected) == answers.folded(answer):
        return {"correct": True, "read": answers.bare(answer), "why": "the same text"}
    read, why = answer, "not equal to the right answer"
    golds = _readings(expected)
    try:
        with limited(CPU_SECONDS):
            for said in _readings(answer):
                read = ", ".join(said)
                for gold in golds:
                    if same_lists(gold, said):
                        return {"correct": True, "read": read, "why": "equal to the right answer"}
    except TooSlow:
        why = f"comparing it takes more than {CPU_SECONDS:g} s"
    except MemoryError:
        why = f"comparing it takes more than {MEMORY >> 20} MB"
    except GraderError:
        raise
    except Exception as error:  # sympy raises anything at all on what is no sensible mathematics
        why = f"it can't be compared: {type(error).__name__}: {error}"[:300]
    return {"correct": False, "read": read, "why": why}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """MEMORY beyond what there is, and so much CPU time; both taken back at the end, where this is no child.

    Raises TooSlow, MemoryError, and GraderError where no signal can be had.
    """

    def over(*_: object) -> None:
        raise TooSlow

    if threading.current_thread() is not threading.main_thread():
        raise GraderError("answers are compared in a process's main thread only: its alarm needs that")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = _lowered(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)
    cpu = _lowered(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds + 1))
    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)  # again and again: one that a callback swallows is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        resource.setrlimit(resource.RLIMIT_CPU, cpu)


def _lowered(kind: int, wanted: int) -> tuple[int, int]:
    """Lower a soft limit; what it was, and the hard one."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if soft == resource.RLIM_INFINITY else min(soft, wanted), hard))
    return soft, hard


# -- lists -----------------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"(?<![\d.,])(?!(?:(?<=[(\[])|(?<=\\\{))[\d,]*\s*\\?[)\]}])\d{1,3}(?:,\d{3})+(?![\d,])")
"""A number with separators; "(100,200)" holds two."""
_BETWEEN = re.compile(r"[,;]|\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_ELLIPSIS = re.compile(r"\\(?:ldots|dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\.")
_CASES = re.compile(r"\\begin\s*\{(?:cases|aligned)\}([^&]*)\\end\s*\{(?:cases|aligned)\}", re.DOTALL)
_EMPTY = re.compile(r"\\\{\s*\\\}")
_LEADING = re.compile(r"\A(?:=|\\approx(?![A-Za-z]))\s*")
_SET = re.compile(r"\\\{(.*)\\\}|\\lbrace(.*)\\rbrace", re.DOTALL)


def _items_of_gold(expected: str) -> list[str]:
    if len(expected) > answers.LONGEST:
        raise TaskError(f"the right answer has {len(expected)} characters, at most {answers.LONGEST} are compared")
    golds = _readings(expected)
    items = [item for item in golds[0] if item]
    if not items or not any(char.isalnum() for char in "".join(items)):
        raise TaskError(f"field 'expected_answer' is {expected!r:.200}: it can't be read as mathematics (write LaTeX)")
    for item in items:
        if not is_text(item) and parsed(item) is None:
            raise TaskError(f"field 'expected_answer' is {expected!r:.200}: {item!r:.80} can't be read as mathematics")
    return items


def _readings(text: str) -> list[list[str]]:
    """The lists of items that a text may mean: "98,118" is a number with a separator, or two numbers."""
    text = answers.bare(text)
    text = _ELLIPSIS.sub(ELLIPSIS, text)
    found = [_items(_THOUSANDS.sub(lambda match: match.group().replace(",", ""), text))]
    listed = _items(text)
    numbers = _THOUSANDS.findall(text)
    if numbers and not any(
        part.startswith("0") and part.strip("0") == "" for n in numbers for part in n.split(",")[1:]
    ):
        found.append(listed)
    return found


def _items(text: str) -> list[str]:
    """The items between the commas, and the words and/or, that stand in no bracket.

    Each is taken apart once more: the braces of a set, plus-minus.
    """
    if system := _CASES.fullmatch(text.strip()):
        text = system[1].replace("\\\\", ",")
    if "\\begin" in text:
        return [text]
    if _EMPTY.fullmatch(text.strip()):
        return ["\\emptyset"]
    braced = _SET.fullmatch(text.strip())
    if braced and not re.search(r"\\mid|\\vert|[|:]|\\\}", braced[1] or braced[2] or ""):
        text = braced[1] or braced[2] or ""
    depth, start, at, parts = 0, 0, 0, []
    while at < len(text):
        border = _BETWEEN.match(text, at) if depth == 0 else None
        if border:
            parts.append(text[start:at])
            start = at = border.end()
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth < 0:
            return [text.strip()]
        at += 1
    parts.append(text[start:])
    items = [_LEADING.sub("", part.strip()) for part in parts]
    return [value for item in items if item for value in _both(item)][:MOST_ITEMS]


def _both(item: str) -> list[str]:
    """`\\pm` as the two values that it stands for, where it stands once and not in a congruence."""
    if len(re.findall(r"\\pm(?![A-Za-z])", item)) != 1 or "mod" in item or "\\mp" in item:
        return [item]
    plus = re.sub(r"(^|[=(\s])\s*\\pm\s*", r"\1", item, count=1)
    plus = plus if plus != item else item.replace("\\pm", "+")
    return [plus, item.replace("\\pm", "-")]


def same_lists(gold: list[str], said: list[str]) -> bool:
    """Each item once, in any order; in this order where an item repeats or an ellipsis stands for some."""
    names, said_names = _names(gold), _names(said)
    if len(names) > 1 and not said_names:  # "(1, 2)" or "1, 2" for "x = 1, y = 2": in the order of the names
        return len(names) == len(values := _components(said)) and all(map(same, _values(gold), values))
    if len(said_names) > 1 and not names and len(gold) == 1 and len(_components(gold)) == len(said_names):
        return all(map(same, _components(gold), _values(said)))
    if len(gold) != len(said):
        one, other = _pieces(gold), _pieces(said)
        return (len(one), len(other)) != (len(gold), len(said)) and same_lists(one, other)
    if len({answers.folded(item) for item in gold}) < len(gold) or ELLIPSIS in gold:
        return all(map(same, gold, said))
    left = list(said)
    for item in gold:
        found = next((at for at, other in enumerate(left) if same(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


_NAMED = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*=\s*([^=<>]+)")


def _names(items: list[str]) -> list[str]:
    """The variables of "x = 1, y = 2": each item has one, and each its own; else none."""
    found = [match[1] for item in items if (match := _NAMED.fullmatch(item))]
    return found if len(found) == len(items) == len(set(found)) else []


def _values(items: list[str]) -> list[str]:
    return [item.partition("=")[2].strip() for item in items]


def _components(items: list[str]) -> list[str]:
    """The items, or those of the one tuple that they are ("(x, y) = (1, 2)" too)."""
    found = re.fullmatch(r"(?:\([^()=]*\)\s*=)?\s*\((.*)\)", items[0].strip()) if len(items) == 1 else None
    return _items(found[1]) if found else items


def _pieces(items: list[str]) -> list[str]:
    """The parts of unions: a policy may write "x < 1 or x > 2" for one."""
    return [piece.strip() for item in items for piece in re.split(r"\\cup(?![A-Za-z])", item)]
