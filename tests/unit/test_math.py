"""Where a final answer stands in a reply, how it may be spelled, and which ones are equal."""

from __future__ import annotations

import contextlib
import itertools
import logging
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import handlers
from handlers import answers, equal
from handlers.math import Math
from pipeline.errors import GraderError, TaskError
from pipeline.interfaces import Context
from tests.data import compmath
from tests.spellings import spellings


def context(gold: str, answer: str = "") -> Context:
    task = handlers.check_task(Math(), {"question": "q", "expected_answer": gold})
    log = logging.LoggerAdapter(logging.getLogger("test"))
    return Context(id="g.0", group="g", sample=0, lane="train", attempt=1, task=task, log=log, state={"answer": answer})


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"First \boxed{7}. Actually \boxed{9}.", "9"),
        (r"\boxed{224}, \boxed{-176}", "224, -176"),
        (r"So $\boxed{1}$ and $\boxed{2}$.", "1, 2"),
        (r"\boxed{1} is wrong, so it is \boxed{2}", "2"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed{\{1,\frac{1}{2}\}}", r"\{1,\frac{1}{2}\}"),
        (r"\boxed 7", "7"),
        ("#### 70,000", "70,000"),
        (r"\fbox{7}", "7"),
        (r"I put it in \boxed{}. The answer is 5", "5"),
        (r"\boxed{5} (in \boxed{}, as you asked)", "5"),
        (r"\boxed{7} or rather \boxed{9", ""),
        (r"The answer is $\frac12$.", r"\frac12"),
        ("The answer is $\\frac12$ because $x=3$.", r"\frac12"),
        ("The final answer is: 1,234 dollars.", "1,234"),
        ("**Answer:** 42", "42"),
        ("### Answer\n\n42\n", "42"),
        ("the answer is\n$$\n\\frac{1}{2}\n$$\n", r"\frac{1}{2}"),
        ("The answer is 3. No: the answer is 4.", "4"),
        ("<answer>12</answer>", "12"),
        ("The answer is Evelyn.", "Evelyn"),
        ("The answer is (B).", "(B)"),
        ("The answer is 5 or 7.", "5 or 7"),
        ("The answer is x = 5, y = 2.", "x = 5, y = 2"),
        ("The answer to the question is \N{MINUS SIGN}3", "-3"),
        ("Solution: Let x be 3.\nThen we have 4 + 3 = 7 apples.", "7"),
        ("We find\n\\[\nx = 12\n\\]\n", "x = 12"),
        ("So he has 42 apples left.", "42"),
        ("it is 1/2", "1/2"),
        ("", ""),
        ("...", ""),
        ("\\boxed{" * 5000, ""),
        ("\\boxed{" + "9" * 5000 + "}", ""),
        ("\\boxed{" + "{" * 900 + "}" * 900 + "}", ""),
        ("\\boxed{1}, " * 2000, ""),
        ("answer " * 3000, ""),
        ("The answer is " + " " * 19_000 + "x", "x"),
        ("9" * 20_000, ""),
        ("$" * 20_000, ""),
    ],
)
def test_the_final_answer_is_found_in_no_time(reply: str, answer: str) -> None:
    began = time.process_time()
    said = answers.final(reply)
    assert said.text == answer and said.where
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1, y=2"),
        ("x=1, y=2", "(x,y)=(1,2)"),
        ("(1,2)", "x=1, y=2"),
        (r"\{x \mid x > 2\}", r"(2,\infty)"),
        (r"n \equiv 1 \pmod 3", r"n\equiv 1 \pmod{3}"),
        (r"\frac{d}{2}", "0.5d"),
        ("5 m", "5"),
        (r"\$4.50", "4.50 dollars"),
        ("18", "18 red apples"),
        (r"6.02\times 10^{23}", r"602\times10^{21}"),
        (r"3\frac{1}{2}", "3 1/2"),
        (r"\emptyset", r"\{\}"),
        (r"\mathbb{R}", r"\mathbb R"),
        (r"\text{10:00 AM}", "10:00 a.m."),
        ("5000000", "5 million"),
        (r"2.5\text{ billion}", r"2.5\times10^9"),
        ("42", r"\approx 42"),
    ],
)
def test_spellings_of_other_books(gold: str, answer: str) -> None:
    equal.check_gold(gold)
    assert equal.compare(gold, answer)["correct"], equal.compare(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"6.626\times10^{-34}", r"1.6\times 10^{-19}"),
        ("10^{-7}", "0.00000001"),
        ("0.00000012", "0"),
        ("1,450", "(1,450)"),
        ("(100,200)", "100200"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
        ("12_8", "12_9"),
        ("2d", "2"),
        ("x=1, y=2", "2, 1"),
        ("1:2:3", "1:3:2"),
        ("6:15", "12:30"),
        ("5", "5 million"),
        ("0.7", r"\infty"),
        ("0.7", "1e999"),
        ("0.7", r"\frac{0}{0}"),
        ("0.7", r"-\infty"),
        ("7", r"\infty"),
        ("0.7", r"(-\infty,\infty)"),
        ("0.7", r"i\infty"),
        ("42", r"42\text{ thousand}"),
        (r"\frac{7}{12}", "7:12:1"),
        (r"n \equiv 1 \pmod 3", r"n\equiv 1 \pmod{4}"),
    ],
)
def test_near_misses_that_a_parser_takes_for_equal(gold: str, answer: str) -> None:
    equal.check_gold(gold)
    assert not equal.compare(gold, answer)["correct"], equal.compare(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"$\frac{6}{8}$", "0.75"),
        ("$x<-2$", r"(-\infty,-2)"),
        (r"x\ge 2", r"[2,\infty)"),
        ("[0,1)", r"0\le x<1"),
        (r"(-\infty,-2)\cup(2,\infty)", "x<-2 or x>2"),
        (r"[1,2]\cup[3,4]", "[1,2]\N{UNION}[3,4]"),
        ("x=3", "3"),
        ("3", "x = 3"),
        ("3", "= 3"),
        (r"50\%", "0.5"),
        (r"60\%", "60"),
        (r"90^\circ", "90"),
        (r"\$1,200.50", "1200.5"),
        ("1{,}000", "1000"),
        ("1000", "1,000"),
        (r"1\,000", "1 000"),
        ("5", r"5 \text{ cm}"),
        ("224, -176", "-176 and 224"),
        ("1,2", r"x=1 \text{ or } x=2"),
        (r"\{1,2\}", "2, 1"),
        ("98,118,122,142", "98, 118, 122, 142"),
        (r"$0,3,6,9, \ldots, 6048$", "0, 3, 6, 9, ..., 6048"),
        (r"0, \pm i \sqrt{6}", r"0, i\sqrt6, -i\sqrt{6}"),
        (r"1\pm\sqrt2", r"1-\sqrt{2}, 1+\sqrt{2}"),
        ("(1,2)", r"\left( 1, 2 \right)"),
        ("(1,2), (3,4)", "(3,4), (1,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
        (r"2\frac{7}{8}", "2.875"),
        (r"0.\overline{3}", r"\frac13"),
        (r"0.1\overline{6}", "1/6"),
        ("1/2", "\N{VULGAR FRACTION ONE HALF}"),
        (r"-3\sqrt{6}", "\N{MINUS SIGN}3\N{SQUARE ROOT}6"),
        (r"3\sqrt{6}", "3*sqrt(6)"),
        (r"\frac{\pi}{4}", "pi/4"),
        (r"2\pi", "2\N{GREEK SMALL LETTER PI}"),
        ("x^2+1", "1 + x\N{SUPERSCRIPT TWO}"),
        ("3 \\cdot 10^{8}", "3e8"),
        (r"$2^{25} 26!$", r"2^{25} \cdot 26!"),
        ("(B)", r"\text{(B)}"),
        ("B", "(B) 12"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\emptyset", r"\varnothing"),
        ("$p=5$ and all primes $p \\equiv \\pm 1(\\bmod 5)$", r"p = 5 \text{ and all primes } p \equiv \pm 1 \pmod{5}"),
    ],
)
def test_equal_answers(gold: str, answer: str) -> None:
    assert equal.compare(gold, answer)["correct"], equal.compare(gold, answer)
    equal.check_gold(gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", "9"),
        ("7", "7 or 9"),
        ("7", "x=7, 9"),
        ("7", "7, 7"),
        ("7", r"3^{10^{20}} \bmod 7"),
        ("7", "garbage ?? 7"),
        ("7", r"\text{not } 7"),
        ("7", "x > 7"),
        ("7", "7x"),
        ("12", "1 2"),
        ("12\\sqrt{3}", "12"),
        ("6,6,6,5,5,6,6,7", "5,6,7"),
        ("6,6,5", "5,6,6"),
        (r"0,3,6,9, \ldots, 6048", "6048"),
        ("1,000", "1, 0"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("1,2", "1"),
        ("1,2", "1,2,3"),
        (r"1\pm\sqrt2", r"1+\sqrt{2}"),
        ("B", "A"),
        ("B", "A. or B."),
        ("(B)", "(A) or (B)"),
        ("Evelyn", "Nyleve"),
        (r"\frac13", "0.33"),
        ("$p=5$ and all primes $p \\equiv \\pm 1(\\bmod 5)$", "5"),
        ("70", r"\frac{"),
        ("70", "}{"),
        ("70", "__import__('os').system('false')"),
    ],
)
def test_answers_that_are_not_equal(gold: str, answer: str) -> None:
    assert not equal.compare(gold, answer)["correct"], equal.compare(gold, answer)


def test_real_right_answers_in_several_spellings_and_those_of_their_neighbours() -> None:
    golds = list(dict.fromkeys(row["expected_answer"] for row in compmath()))
    odd = [gold for gold in golds if not gold.lstrip("-").isdigit()]
    chosen = odd[::3] + [gold for gold in golds if gold not in odd][::12]
    for gold, other in itertools.pairwise([*chosen, chosen[0]]):
        for reply in spellings(gold)[:4]:
            assert equal.compare(gold, answers.final(reply).text)["correct"], (gold, reply)
        found = equal.compare(gold, answers.final(spellings(other)[0]).text)
        assert not found["correct"], (gold, other, found)


@pytest.mark.parametrize("gold", ["$$", r"\frac{1}", "...", "9" * 3000])
async def test_a_gold_that_is_no_mathematics_is_the_tasks_fault(gold: str) -> None:
    with pytest.raises(TaskError, match="can't be read as mathematics|characters, at most"):
        await Math().init(context(gold))


async def test_a_gold_that_computes_for_ever_is_the_tasks_fault() -> None:
    with pytest.raises(TaskError, match="takes too long to compare: write it simpler"):
        await Math().init(context("9^{9^{9^9}}"))


async def test_the_reward_says_why() -> None:
    reward = await Math().eval(context("$7$", r"First \boxed{7}. Actually \boxed{9}."))
    assert (reward.value, reward.parts) == (0.0, {"correct": 0.0})
    assert reward.evidence == {"why": r"not equal to the right answer (the last \boxed{})", "read": "9", "gold": "$7$"}
    reward = await Math().eval(context("$7$", "\\boxed{7"))
    assert reward.value == 0.0 and "never closed" in reward.evidence["why"]
    assert (await Math().eval(context("$7$", "It is 7."))).value == 1.0


class Child:
    """Stands for `Context.compute`: what happens to each call of the grader's child."""

    def __init__(self, *fates: Any) -> None:
        self.fates, self.called = list(fates), []  # type: ignore[var-annotated]

    async def __call__(self, function: Any, args: Any, timeout: float) -> Any:
        self.called.append((function.__name__, timeout))
        fate = self.fates.pop(0)
        if isinstance(fate, BaseException):
            raise fate
        return fate


def died(code: str) -> GraderError:
    error = GraderError("the grader's process died")
    error.exit_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("fates", "outcome"),
    [
        ([TimeoutError(), "7", {"correct": True, "read": "7", "why": "equal"}], 1.0),
        ([TimeoutError(), "7", TimeoutError(), "7"], 0.0),
        ([died("-24"), "7"], 0.0),
        ([died("-11"), "7"], 0.0),
        ([died("-6"), "7"], 0.0),
        ([died("-24"), TimeoutError()], GraderError),
        ([TimeoutError(), TimeoutError()], GraderError),
        ([TimeoutError(), TaskError("too long")], GraderError),
        ([died("-9")], GraderError),
        ([GraderError("the grader raised")], GraderError),
    ],
)
async def test_whose_fault_it_is_when_the_child_ends(fates: list[Any], outcome: Any) -> None:
    ctx, child = context("7", r"\boxed{8}"), Child(*fates)
    ctx._compute = child
    if outcome is GraderError:
        with pytest.raises(GraderError):
            await Math().eval(ctx)
    else:
        reward = await Math().eval(ctx)
        assert reward.value == outcome and reward.evidence["why"]
    assert all(timeout <= 5.0 for _, timeout in child.called)


def test_memory_and_time_are_limited_while_it_compares_and_not_after() -> None:
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_CPU)
    before = [resource.getrlimit(kind) for kind in kinds]
    with equal.limited(5.0), pytest.raises(MemoryError):
        bytearray(2 << 30)
    with pytest.raises(equal.TooSlow), equal.limited(0.05):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))
    assert [resource.getrlimit(kind) for kind in kinds] == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_comparison_in_another_thread_is_the_graders_fault() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(GraderError, match="main thread only"):
        pool.submit(equal.compare, "7", "8").result()


async def test_the_golden_answer_scores() -> None:
    for gold in ("$\\frac{4}{9}$", "$3 \\sqrt{6}$.", "224, -176"):
        ctx = context(gold)
        ctx.state["answer"] = f"\\boxed{{{Math().gold(ctx.task)}}}"
        assert "\\boxed" in Math().prompt(ctx.task)
        assert (await Math().eval(ctx)).value == 1.0
