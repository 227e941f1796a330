"""Questions of science: a choice among given ones, a number with its unit, a formula, or a short text."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from handlers import answers, equal, math, quantities
from handlers.quantities import Quantity
from handlers.turns import Turns
from handlers.units import Unit, unit
from pipeline.errors import TaskError
from pipeline.interfaces import Context, Reward

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Kind = Literal["auto", "choice", "number", "formula", "text"]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Stem(Turns):
    """1.0 for the right answer in the last \\boxed{} (none: after "the answer is", or in the last line), else 0.0.

    A choice is named by its letter or by its text; a letter inside a word is none, two letters are none. A number is
    right within the wider of the two tolerances, in any unit of the same dimension. Evidence: why, read, gold.
    """

    preload: ClassVar[tuple[str, ...]] = ("math_verify", "handlers.equal", "sympy.physics.units.systems")

    class Task(BaseModel):
        """`question`; `answer`: the right one, and `also`: others that are as right.

        `choices`: texts in the order of their letters; `answer` is then a letter or one of these texts. `kind`: what
        the answer is; "auto" goes by `choices`, and by what `answer` looks like. For numbers: `unit` where `answer`
        has none ("3.0e8 m/s" has one), `unit_required`: one without is wrong; `tolerance`, relative (not given: 0.01,
        but 0 for a whole number without a unit, which is a count), and `absolute`, in that unit.
        """

        model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

        question: Text
        answer: Text
        also: list[Text] = Field(default_factory=list)
        choices: list[Text] = Field(default_factory=list, max_length=len(LABELS))
        kind: Kind = "auto"
        unit: str = ""
        unit_required: bool = False
        tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None
        absolute: Annotated[float, Field(ge=0)] = 0.0

    async def init(self, ctx: Context) -> None:
        kind = await ctx.compute(check_gold, ctx.task.model_dump(), timeout=math.SECONDS)
        if kind == "formula":
            for gold in (ctx.task.answer, *ctx.task.also):
                await math.check(ctx, gold)
        ctx.state["kind"] = kind

    def prompt(self, task: Stem.Task) -> str:
        if task.choices:
            listed = "\n".join(f"{label}. {text}" for label, text in zip(LABELS, task.choices, strict=False))
            return f"{task.question}\n\n{listed}\n\nEnd with the letter of your choice within \\boxed{{}}."
        with_unit = " with its unit" if task.unit_required else ""
        return f"{task.question}\n\nThink step by step, and put your final answer{with_unit} within \\boxed{{}}."

    async def eval(self, ctx: Context) -> Reward:
        kind = ctx.state["kind"]
        if kind != "formula":
            checked = (check_answer, ctx.task.model_dump(), kind, ctx.answer), (check_gold, ctx.task.model_dump())
            return reward(ctx.task, await math.ended(ctx, *checked))
        said = answers.final(ctx.answer)
        found = [await math.grade(ctx, gold, said) for gold in (ctx.task.answer, *ctx.task.also)]
        return max(found, key=lambda one: one.value)

    def gold(self, task: Stem.Task) -> str:
        found = quantities.read(task.answer) if task.unit else None
        bare = found is not None and found.unit is None
        return label_of(task.answer, task.choices) or (f"{task.answer} {task.unit}" if bare else task.answer)


def reward(task: Stem.Task, found: dict[str, Any]) -> Reward:
    value = float(found["correct"])
    evidence = {"why": found["why"], "read": found["read"] and found["read"][:500], "gold": task.answer[:500]}
    return Reward(value=value, parts={"correct": value}, evidence=evidence)


def check_gold(task: dict[str, Any]) -> str:
    """Which kind of answer is wanted. Raises TaskError for a right answer that is none of that kind."""
    kind, golds = task["kind"], [task["answer"], *task["also"]]
    if kind == "auto":
        kind = "choice" if task["choices"] else _kind_of(task["answer"])
    for gold in golds:
        if kind == "choice" and not label_of(gold, task["choices"]) and (task["choices"] or not answers.letter(gold)):
            raise TaskError(
                f"the right answer {gold!r:.80} is no letter and no text of the {len(task['choices'])} choices"
            )
        if kind == "number" and _gold_quantity(task, gold) is None:
            raise TaskError(f"the right answer {gold!r:.80} can't be read as a number (as 3.0e8 m/s, \\frac{{1}}{{2}})")
        if kind == "text" and not plain(gold):
            raise TaskError(f"the right answer {gold!r:.80} has neither letters nor digits")
    if kind == "number" and task["unit"] and _unit_of(task["unit"]) is None:
        raise TaskError(f"field 'unit' is {task['unit']!r}: no unit that is known (write it as m/s^2, kJ/(mol K))")
    return str(kind)


def _kind_of(gold: str) -> str:
    if answers.letter(gold) and len(gold) > 1:
        return "choice"
    found = quantities.read(gold)
    if found is not None and not found.rest.strip() and "=" not in gold:
        return "number"
    if _compound(gold):
        return "text"
    return "formula" if re.search(r"[\\^=_$]|\d", gold) else "text"


def check_answer(task: dict[str, Any], kind: str, reply: str) -> dict[str, Any]:
    """{"correct", "read", "why"}: whether this reply holds a right answer."""
    said = answers.final(reply, whole=True)
    if not said.text:
        return {"correct": False, "read": None, "why": said.where}
    golds = [task["answer"], *task["also"]]
    if kind == "choice":
        chosen = label_said(said, task["choices"])
        right = chosen in {label_of(gold, task["choices"]) or answers.letter(gold) for gold in golds}
        why = "the right choice" if right else "another choice" if chosen else "it names no choice, or more than one"
        return {"correct": bool(chosen) and right, "read": chosen or said.text, "why": f"{why} ({said.where})"}
    if kind == "number":
        why = _why_not(task, golds, said)
        return {"correct": not why, "read": said.text, "why": f"{why or 'within the tolerance'} ({said.where})"}
    right = any(_same_text(said.text, gold) for gold in golds)
    return {"correct": right, "read": said.text, "why": f"{'the same' if right else 'another'} text ({said.where})"}


# -- choices ---------------------------------------------------------------------------------------------------------


def label_of(gold: str, choices: list[str]) -> str:
    """The letter of the choice that this is: by its letter, else by its text; "" for none."""
    by_letter = answers.letter(gold)
    if by_letter and LABELS.index(by_letter) < len(choices):
        return by_letter
    same = [label for label, text in zip(LABELS, choices, strict=False) if plain(text) == plain(gold)]
    return same[0] if len(same) == 1 else ""


_CLAIM = re.compile(
    r"\s*(?:(?:option|choice|answer)\s+)?"
    r"(?P<open>[\(\[{*]*)\s*(?P<letter>[A-Za-z])\s*(?P<close>[\)\]}*]*)(?=$|[\s.,:;)\]}])",
    re.IGNORECASE,
)
_MENTION = re.compile(
    r"[(\[]\s*([A-Za-z])\s*[)\]]|\b(?:[Oo]ption|[Cc]ho(?:ice|ose)|[Pp]ick|[Ss]elect)(?:\s+is)?[\s:*]+\(?([A-Z])(?![\w'])"
    r"|\b(?:option|choice)\s+\(?([a-z])(?![\w'])"
    r"|(?:\bor\b|\band\b|,)\s*\(?([A-Z])(?![\w'])"
)
_OTHERS = re.compile(r"(?:[\s,;/|&+]*[A-Z]\b)+[\s.]*")
_ARTICLE = re.compile(r"\s+(?!and\b|or\b)[a-z]")


def label_said(said: answers.Said, choices: list[str]) -> str:
    """The letter that a final answer claims; "" for none, and for more than one."""
    text = answers.bare(said.text)
    for _ in range(2):
        text = answers.WRAPPED.sub(r"\1", text).strip("{} ")
    known = set(LABELS[: len(choices)] or LABELS)
    mentioned = {next(filter(None, found)).upper() for found in _MENTION.findall(text)} & known
    claim = _CLAIM.match(text)
    if claim and claim["letter"].upper() in known:
        letter, marked = claim["letter"].upper(), bool(claim["open"].strip("*") or claim["close"].strip("*"))
        behind = text[claim.end() :]
        article = not marked and claim["letter"] in "AIai" and _ARTICLE.match(behind)
        small = claim["letter"].islower() and not marked and bool(behind.strip(" ."))
        if choices and plain(behind) and plain(behind) == plain(choices[LABELS.index(letter)]):
            return letter  # its text may name other choices
        if not article and not small:
            return letter if mentioned <= {letter} and not _OTHERS.fullmatch(behind) else ""
    by_text = label_of(text, choices) if choices else ""
    if by_text:
        return by_text
    return mentioned.pop() if len(mentioned) == 1 else ""


# -- numbers and texts -----------------------------------------------------------------------------------------------

TOLERANCE = 0.01
"""Relative, of a measured number where the task gives none."""

_COUNT = re.compile(r"[-+]?[\d,]+")
_MORE = re.compile(r"\s*(?:,|;|or\b|and\b|[/|&])\s*[-+]?\s*[\d.\\]")
_GOES_ON = re.compile(r"(?!(?:st|nd|rd|th)\b)[A-Za-z!_^(]")
"""Right behind a number it makes another one, or a formula: "12x", "12!"."""

_MORE_BARE = re.compile(r"\s+[-+]?\d")


def _tolerance(task: dict[str, Any], gold: str) -> float:
    """The task's; else none for a count: a whole number without a unit."""
    if task["tolerance"] is not None:
        return float(task["tolerance"])
    return 0.0 if _COUNT.fullmatch(answers.bare(gold)) and not task["unit"] else TOLERANCE


def _unit_of(text: str) -> Unit | None:
    tidy = quantities.tidy(text)
    found, end = unit(tidy)
    return found if not tidy[end:].strip() else None


def _gold_quantity(task: dict[str, Any], gold: str) -> Quantity | None:
    found = quantities.read(gold)
    if found is None or found.unit is not None or not task["unit"]:
        return found
    return found._replace(unit=_unit_of(task["unit"]))


def _why_not(task: dict[str, Any], golds: list[str], said: answers.Said) -> str:
    """Why this is none of the right numbers; "" where it is one."""
    try:
        with equal.limited(equal.CPU_SECONDS):
            found = quantities.read(said.text, last=said.where == "the last line")
            if found is None:
                return "no number is read from it"
            if _MORE.match(found.rest) or (found.unit is None and _MORE_BARE.match(found.rest)):
                return "it names more than one number"
            boxed = said.where.startswith("the last \\boxed")
            if boxed and found.unit is None and _GOES_ON.match(found.rest):
                return f"more than a number stands there: {found.rest[:40]!r} is behind it"
            read = [(_gold_quantity(task, gold), task | {"tolerance": _tolerance(task, gold)}) for gold in golds]
            whys = [_why_not_this(about, gold, found, boxed=boxed) for gold, about in read if gold is not None]
            return "" if "" in whys else whys[0]
    except equal.TooSlow:
        return f"reading it takes more than {equal.CPU_SECONDS:g} s"
    except MemoryError:
        return f"reading it takes more than {equal.MEMORY >> 20} MB"


def _why_not_this(task: dict[str, Any], gold: Quantity, found: Quantity, *, boxed: bool) -> str:
    if boxed and found.unit is None and gold.unit is not None and re.match(r"\s*[A-Za-z\\%]", found.rest):
        return f"its unit {found.rest.strip()[:40]!r} is not known"
    if found.unit is None and gold.unit is not None:
        if task["unit_required"]:
            return "it has no unit"
        if not gold.unit.dimensions and found.within(gold, task["tolerance"], task["absolute"]):
            return ""  # 0.05 for 5 %
        found = found._replace(unit=gold.unit)
    elif gold.unit is None and found.unit is not None:
        if not found.unit.dimensions and found.within(gold, task["tolerance"], task["absolute"]):
            return ""
        found = found._replace(unit=None)
    elif gold.unit and found.unit and gold.unit.dimensions != found.unit.dimensions:
        return "its unit measures something else"
    within = found.within(gold, task["tolerance"], task["absolute"])
    return "" if within else f"it lies outside the tolerance of {task['tolerance']:g}"


_COMPOUND = re.compile(r"(?=.*\d|.*[a-z].*[A-Z]|.*[A-Z].*[A-Z][a-z])(?:[A-Z][a-z]?|\d|[()\[\]])+(?:\^\d?[-+])?")
_LOWERED = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")


def _compound(text: str) -> str:
    """A chemical formula without its markup, capitals kept ("H_2SO_4" is "H2SO4", "Co" is no "CO"); "" for none."""
    text = answers.bare(text.translate(_LOWERED))
    text = answers.unwrapped(text)
    text = re.sub(r"\\ce(?=\{)|[_{}\s$]", "", text)
    return text if len(text) > 1 and text[0] in f"([{LABELS}" and _COMPOUND.fullmatch(text) else ""


def _same_text(said: str, gold: str) -> bool:
    return _compound(said) == _compound(gold) if _compound(gold) else plain(said) == plain(gold)


_NOT_TEXT = re.compile(r"[^\w]+")
_SMALL = re.compile(r"\b(?:the|an|a)\s+(?=\w)")


def plain(text: str) -> str:
    """A short text for comparison: no capitals, articles, markup and punctuation."""
    text = answers.bare(text)
    text = answers.unwrapped(text)
    return _NOT_TEXT.sub(" ", _SMALL.sub("", text.casefold().replace("-", " - "))).strip()
