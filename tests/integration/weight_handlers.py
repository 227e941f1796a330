"""A handler for tests of weights: one question to the policy, whatever it says is worth 1."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from handlers.turns import Turns
from pipeline.interfaces import Context, Reward


class Ask(Turns):
    """Asks `question`, once."""

    class Task(BaseModel):
        """`question` in words."""

        model_config = ConfigDict(frozen=True)

        question: str

    def prompt(self, task: Ask.Task) -> str:
        return task.question

    async def eval(self, ctx: Context) -> Reward:
        return Reward(value=1.0)
