"""Choices by letter or text, numbers with units and tolerances, short texts: what is read, and what is right."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

import handlers
from handlers import answers, stem
from handlers.answers import Said
from handlers.quantities import read
from handlers.stem import Stem
from pipeline.errors import TaskError
from pipeline.interfaces import Context, Reward

CHOICES = ["12 m", "a gas", "Both of them", "12 s"]


async def scored(answer: str, reply: str, **about: Any) -> Reward:
    task = handlers.check_task(Stem(), {"question": "q", "answer": answer, **about})
    ctx = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, task=task, state={"answer": reply},
        log=logging.LoggerAdapter(logging.getLogger("test")),
    )  # fmt: skip
    await Stem().init(ctx)
    return await Stem().eval(ctx)


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{\textbf{(C) } 7}", "C"),
        (r"\boxed{B. a gas}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{a gas}", "B"),
        (r"\boxed{\text{A gas}}", "B"),
        (r"\boxed{12 m}", "A"),
        (r"First \boxed{A}. Actually \boxed{C}.", "C"),
        ("The answer is C", "C"),
        ("The answer is (C).", "C"),
        ("The answer is C because it is larger than (B).", ""),
        ("The answer is C because it is larger.", "C"),
        ("The answer is **D**.", "D"),
        ("The correct answer is option D.", "D"),
        ("Answer: D. 12 s", "D"),
        ("The answer is A. No wait, the answer is B.", "B"),
        ("Answer: (B) a gas", "B"),
        ("C.", "C"),
        ("(C)", "C"),
        ("C) Both of them", "C"),
        ("So it must be option B.", "B"),
        ("Therefore (D) holds.", "D"),
        ("The answer is a gas.", "B"),
        ("The answer is A gas.", "B"),
        ("The answer is both of them", "C"),
        ("The answer is a mystery to me.", ""),
        ("A man walks into a bar.", ""),
        ("I think so.", ""),
        ("A or B", ""),
        ("The answer is (A) or (B).", ""),
        (r"\boxed{A, B}", ""),
        (r"\boxed{A} and \boxed{B}", ""),
        ("The answer is E.", ""),
        ("Apple", ""),
        ("", ""),
    ],
)
async def test_the_choice_that_is_claimed(reply: str, letter: str) -> None:
    for label in "ABCD":
        reward = await scored(label, reply, choices=CHOICES)
        assert reward.value == (label == letter), (label, reward.evidence)


async def test_the_right_choice_may_be_given_as_its_text() -> None:
    assert (await scored("a gas", r"\boxed{B}", choices=CHOICES)).value == 1.0
    assert (await scored("(B)", r"\boxed{B}", choices=[])).value == 1.0
    assert (await scored("B", r"\boxed{C}", choices=CHOICES, also=["C"])).value == 1.0
    task = handlers.check_task(Stem(), {"question": "q", "answer": "a gas", "choices": CHOICES})
    assert Stem().gold(task) == "B" and "\nB. a gas\n" in Stem().prompt(task)


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        ("3.0e8 m/s", "300000 km/s"),
        ("3.0e8 m/s", r"3 \times 10^8 \text{ m/s}"),
        ("3.0e8 m/s", r"3.00\cdot 10^{8}\,\mathrm{m\,s^{-1}}"),
        ("3.0e8 m/s", "3\N{MIDDLE DOT}10\N{SUPERSCRIPT EIGHT} m s\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT ONE}"),
        ("3.0e8 m/s", "3e8"),
        ("3.0e8 m/s", "c = 2.998 x 10^8 m/s"),
        ("8.314 J/(mol K)", r"8.31 \text{ J mol}^{-1}\text{K}^{-1}"),
        ("25 \N{DEGREE SIGN}C", "298.15 K"),
        ("300 K", r"26.85^\circ\text{C}"),
        ("5%", "0.05"),
        ("5%", "5"),
        ("0.05", r"5\%"),
        ("30", r"30^\circ"),
        ("1 atm", "760 mmHg"),
        ("10 \N{MICRO SIGN}m", r"0.01 \text{ mm}"),
        (r"10 \mu\text{m}", "1e-5 m"),
        (r"4.7 k\Omega", "4700 ohm"),
        ("60 mph", "96.56 km/h"),
        ("5 kcal", "20.92 kJ"),
        (r"2\pi \text{ m}", "6.283 m"),
        (r"\frac{1}{2} m", "50 cm"),
        ("0.5", r"\frac{1}{2}"),
        ("6.283", r"2\pi"),
        ("1234.5", "1,234.5"),
        ("-40", "\N{MINUS SIGN}40"),
        ("5 to 7 cm", "0.06 m"),
        ("5 to 7 cm", "5-7 cm"),
        ("5 apples", "5"),
        ("10^{-3} s", "1 ms"),
        (r"3.0 \pm 0.1 m", "3 m"),
    ],
)
async def test_numbers_that_are_right(gold: str, said: str) -> None:
    for reply in (f"\\boxed{{{said}}}", f"The answer is {said}."):
        reward = await scored(gold, reply)
        assert reward.value == 1.0, (reply, reward.evidence)


@pytest.mark.parametrize(
    ("gold", "said", "why"),
    [
        ("3.0e8 m/s", "3.0e8 m", "its unit measures something else"),
        ("3.0e8 m/s", "300000 m/s", "outside the tolerance"),
        ("3.0e8 m/s", "3e8 parrots", "unit 'parrots' is not known"),
        ("5 kg", "5 N", "its unit measures something else"),
        ("42", "41", "outside the tolerance"),
        ("42", "42 or 43", "more than one number"),
        ("42", "no idea", "no number"),
        ("5 to 7 cm", "8 cm", "outside the tolerance"),
        ("5 to 7 cm", "1-20 cm", "outside the tolerance"),
        ("42", "1e999", "no number"),
        ("42", "9^{9^{9^9}}", "takes more than|no number"),
    ],
)
async def test_numbers_that_are_wrong(gold: str, said: str, why: str) -> None:
    reward = await scored(gold, f"\\boxed{{{said}}}", kind="number")
    assert reward.value == 0.0
    assert any(word in reward.evidence["why"] for word in why.split("|")), reward.evidence


async def test_tolerances_and_units_are_the_tasks() -> None:
    assert (await scored("100 m", r"\boxed{104 m}", tolerance=0.05)).value == 1.0
    assert (await scored("100 m", r"\boxed{104 m}", tolerance=0.0, absolute=5.0)).value == 1.0
    assert (await scored("100 m", r"\boxed{0.106 km}", tolerance=0.0, absolute=5.0)).value == 0.0
    assert (await scored("0", r"\boxed{0.001}", absolute=0.01)).value == 1.0
    assert (await scored("9.8", r"\boxed{980 cm/s^2}", unit="m/s^2")).value == 1.0
    required = {"unit": "m/s^2", "unit_required": True}
    assert (await scored("9.8", r"\boxed{9.8 m/s^2}", **required)).value == 1.0
    without = await scored("9.8", r"\boxed{9.8}", **required)
    assert without.value == 0.0 and "it has no unit" in without.evidence["why"]
    assert (await scored("300000 km/s", "It flies.\nSo its speed is therefore 3.0e8 m/s.")).value == 1.0


@pytest.mark.parametrize(
    ("gold", "reply", "value"),
    [
        ("Mitochondria", r"\boxed{\text{the mitochondria}}", 1.0),
        ("Mitochondria", "The answer is mitochondria.", 1.0),
        ("Mitochondria", "The answer is ribosomes and mitochondria.", 0.0),
        ("sodium chloride", "**Answer:** Sodium-chloride", 1.0),
        ("$mc^2$", r"\boxed{E = mc^2}", 1.0),
        (r"\frac{1}{2}mv^2", r"\boxed{0.5 m v^{2}}", 1.0),
        (r"\frac{1}{2}mv^2", r"\boxed{mv^2}", 0.0),
        ("x^2+1", "The answer is $1+x^2$.", 1.0),
    ],
)
async def test_texts_and_formulas(gold: str, reply: str, value: float) -> None:
    reward = await scored(gold, reply)
    assert reward.value == value, reward.evidence
    assert reward.evidence["why"] and reward.evidence["gold"] == gold


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"answer": "E", "choices": CHOICES}, "no letter and no text of the 4 choices"),
        ({"answer": "plasma", "choices": CHOICES}, "no letter and no text of the 4 choices"),
        ({"answer": "many", "kind": "number"}, "can't be read as a number"),
        ({"answer": "5", "unit": "parrots"}, "no unit that is known"),
        ({"answer": "...", "kind": "text"}, "neither letters nor digits"),
        ({"answer": r"\frac{1}", "kind": "formula"}, "can't be read as mathematics"),
    ],
)
async def test_a_gold_that_is_none_is_the_tasks_fault(task: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        await scored(reply="", **task)


@pytest.mark.parametrize(
    "text",
    ["1" * 20_000, "1," * 10_000, "m/" * 10_000, "(" * 20_000, "5 " + "m " * 9_000, "10^" * 6_000, "\\frac{" * 3000],
)
def test_reading_takes_no_time(text: str) -> None:
    began = time.process_time()
    read(text[:2000])
    stem.label_said(Said(text[:2000], "x"), CHOICES)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("gold", "said", "value"),
    [
        ("100", "101", 0.0),
        ("100", "100.0", 1.0),
        ("100.0", "101", 1.0),
        ("100 m", "101 m", 1.0),
        ("12", "12 13", 0.0),
        ("12", "12x", 0.0),
        ("12", "12!", 0.0),
        ("12", "12 apples", 1.0),
        ("2", "2+3", 0.0),
        ("7", r"10^{10^{10}} \bmod 7", 0.0),
        ("H2SO4", r"\mathrm{H_2SO_4}", 1.0),
        ("H2SO4", "H\u2082SO\u2084", 1.0),
        ("CO2", "Co2", 0.0),
    ],
)
async def test_counts_are_exact_and_a_number_stands_alone(gold: str, said: str, value: float) -> None:
    assert (await scored(gold, rf"\boxed{{{said}}}")).value == value


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("I choose B", "B"),
        ("The correct option is B.", "B"),
        (r"\boxed{C. Both A and B}", "C"),
        (r"\boxed{B;C}", ""),
        (r"\boxed{B \quad C}", ""),
    ],
)
def test_a_choice_in_other_words(said: str, letter: str) -> None:
    assert stem.label_said(answers.final(said, whole=True), ["x", "y", "Both A and B"]) == letter


def test_the_gold_has_the_unit_that_is_required() -> None:
    task = Stem.Task(question="?", answer="19.6", unit="N", unit_required=True)
    assert Stem().gold(task) == "19.6 N"
    assert Stem().gold(Stem.Task(question="?", answer="19.6 N", unit="N")) == "19.6 N"
