"""What the scripted policy says, as sampled ids: nobody's model, only answers that were looked up beforehand.

The same seed and the same request give the same ids and logprobs. A share of the replies is tokenised in a way that the
tokenizer itself would never choose, as real samples are, so that whoever tokenises again is found out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workers.policy.rendering import Rendering

NAME = "scripted policy: nobody's model"

_OPENERS = ("", "Let me see. ", "I work it out step by step. ", "Well then. ", "First I read the question again. ")
_FILLERS = (
    "I write down what is given.",
    "Then I take the numbers one by one.",
    "That part is simple enough.",
    "I check the result once more.",
    "Nothing was left out.",
    "So far so good.",
)
_SPLITS = 0.1
"""Share of a drifting reply's tokens that are split."""


class Said(NamedTuple):
    """A whole reply before any limit: ids end with the turn's close; one negative, finite logprob per id."""

    ids: list[int]
    logprobs: list[float]


@dataclass
class Speech:
    """Answers a prompt. `answers`: question -> gold text, or a list with one entry per turn of the policy.

    An entry is an assistant message, or text that is sampled as it stands (control markup such as <tool_call> included:
    that is how a broken call is scripted). `p_correct` is the chance of the right answer, `drift` that of an unusual
    tokenisation. `says`: what is said where no answer is known.
    """

    rendering: Rendering
    answers: dict[str, Any] = field(default_factory=dict)
    p_correct: float = 0.6
    drift: float = 0.2
    seed: int = 0
    says: str = ""

    def __post_init__(self) -> None:
        tokenizer = self.rendering.tokenizer
        self._start: int = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._response: int = tokenizer.convert_tokens_to_ids("<tool_response>")
        self._vocabulary: dict[str, int] = tokenizer.raw.get_vocab(with_added_tokens=False)
        self._pieces = {token: text for text, token in self._vocabulary.items() if not text.startswith("<|")}
        self._found: dict[str, Any] = {}

    def until(self, ids: Sequence[int], stop: Sequence[str]) -> int:
        """How many of these ids are said before one of the texts in `stop` is complete; all where none comes."""
        for count in range(1, len(ids) + 1) if stop else ():
            text = self.rendering.text(ids[:count])
            if any(mark in text for mark in stop):
                return count
        return len(ids)

    def chance(self, ids: npt.NDArray[np.uint32], *about: object) -> random.Random:
        """The request's own random numbers."""
        text = "|".join(map(str, (self.seed, *about))).encode()
        return random.Random(hashlib.blake2b(ids.tobytes() + text, digest_size=16).digest())

    def lot(self, *about: object) -> random.Random:
        """Random numbers that hang on no prompt."""
        return random.Random(hashlib.blake2b("|".join(map(str, (self.seed, *about))).encode()).digest())

    def reply(self, ids: npt.NDArray[np.uint32], chance: random.Random) -> Said:
        """What follows the prompt `ids`."""
        question, turn = self._read(ids)
        said = self._words(question, turn, chance)
        if chance.random() < self.drift:
            said = self._drifted(said, chance)
        return Said(said, [-round(chance.expovariate(2.0) + 0.0001, 4) for _ in said])

    def question(self, ids: npt.NDArray[np.uint32]) -> str:
        """The last question of the user in this prompt."""
        return self._read(ids)[0]

    def _read(self, ids: npt.NDArray[np.uint32]) -> tuple[str, int]:
        """The last question of the user, and how many turns the policy has had since."""
        starts = [*np.flatnonzero(ids == self._start).tolist(), len(ids)]
        turns = -1
        for start, end in zip(starts[-2::-1], starts[:0:-1], strict=True):
            segment = ids[start + 1 : end]
            if self._head(segment).startswith("assistant"):
                turns += 1
            elif self._head(segment).startswith("user") and not (segment[:4] == self._response).any():
                text = self.rendering.tokenizer.decode(segment.tolist()).removeprefix("user\n")
                return text.rsplit("<|im_end|>", 1)[0].strip(), max(turns, 0)
        return "", max(turns, 0)

    def _head(self, segment: npt.NDArray[np.uint32]) -> str:
        return self.rendering.tokenizer.decode(segment[:6].tolist())

    def _words(self, question: str, turn: int, chance: random.Random) -> list[int]:
        gold = self._gold(question)
        if gold is None:
            return self._spoken(self.says or f"I am a {NAME}. You said: {question[:200]}")
        if isinstance(gold, str):
            right = chance.random() < self.p_correct
            return self._spoken(_say(gold if right else self._wrong(gold, chance), question, chance))
        if turn == 0 and chance.random() >= self.p_correct:
            return self._spoken("I can't do this.")
        entry = gold[turn] if turn < len(gold) else "Done."
        if isinstance(entry, str):
            return [*self.rendering.tokenizer.encode(entry), self._end]
        return self.rendering.spoken(entry)

    def _spoken(self, text: str) -> list[int]:
        return self.rendering.spoken({"role": "assistant", "content": text})

    def _gold(self, question: str) -> Any:
        """The answer to this question, or to one that stands inside it (a prompt may say more than the question)."""
        if question not in self._found:
            inside = max((known for known in self.answers if known and known in question), key=len, default=None)
            self._found[question] = self.answers.get(question, self.answers.get(inside) if inside else None)
        return self._found[question]

    def _wrong(self, gold: str, chance: random.Random) -> str:
        try:
            return str(int(gold) + chance.choice((-10, -2, -1, 1, 2, 10)))
        except ValueError:
            others = [text for text in self.answers.values() if isinstance(text, str) and text != gold]
            return chance.choice(others[:1000]) if others else "I don't know"

    def _drifted(self, said: Sequence[int], chance: random.Random) -> list[int]:
        """The same bytes in smaller tokens: at least one is split, where one can be."""
        able = [at for at, token in enumerate(said) if len(self._pieces.get(token, "")) > 1]
        chosen = set(chance.sample(able, max(1, int(len(able) * _SPLITS)))) if able else set()
        drifted: list[int] = []
        for at, token in enumerate(said):
            drifted.extend(self._split(token, chance) if at in chosen else (token,))
        return drifted

    def _split(self, token: int, chance: random.Random) -> tuple[int, ...]:
        piece, known = self._pieces[token], self._vocabulary
        cuts = [at for at in range(1, len(piece)) if piece[:at] in known and piece[at:] in known]
        if not cuts:
            return (token,)
        at = chance.choice(cuts)
        return known[piece[:at]], known[piece[at:]]


def _say(answer: str, question: str, chance: random.Random) -> str:
    """One of several ways to say it, in the form that the question asks for."""
    if "<answer>" in question:
        last = f"<answer>{answer}</answer>"
    elif "\\boxed" in question:
        last = f"The answer is \\boxed{{{answer}}}."
    elif "\n" in answer:  # code, say: a word before it would break its fence
        last = answer
    else:
        last = chance.choice((answer, f"The answer is {answer}", f"It is {answer}"))
    fillers = " ".join(chance.choices(_FILLERS, k=chance.randint(0, 6)))
    return f"{chance.choice(_OPENERS)}{fillers}\n{last}"
