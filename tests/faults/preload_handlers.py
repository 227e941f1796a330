"""A handler whose plain method wants a module that was imported before the call's process began."""

from __future__ import annotations

import sys
from typing import ClassVar

from pipeline.interfaces import AgentHandler, Context, Reward

THERE = [name for name in ("colorsys", "no_such_module") if name in sys.modules]


class Preloads(AgentHandler):
    """Its evidence: which of its modules were there when this file was imported in the call."""

    preload: ClassVar[tuple[str, ...]] = ("colorsys", "no_such_module")

    async def run(self, ctx: Context) -> None:
        ctx.state["answer"] = ""

    def eval(self, ctx: Context) -> Reward:  # type: ignore[override]
        return Reward(value=1.0, evidence={"there": THERE})
