"""The task family of this example: say a word in capital letters.

It is of a size that a random model learns within minutes on two cores. What counts is a share, not the word, so that
the first rollouts are not all worth nothing.
"""

from __future__ import annotations

from pydantic import BaseModel

from handlers.turns import Turns
from pipeline.interfaces import Context, Message


class Capitals(Turns):
    """1.0 for a reply of capital letters alone; else their share of the reply's characters, blanks left out."""

    class Task(BaseModel):
        word: str

    def prompt(self, task: Task) -> str:
        return f"Say {task.word} in capital letters."

    async def eval(self, ctx: Context) -> float:
        said = "".join(ctx.answer.split())
        return sum(map(str.isupper, said)) / len(said) if said else 0.0

    def gold(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": task.word.upper()}]  # a message: a text would be said in a sentence
