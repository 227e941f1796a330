"""The page docs/add-a-handler.md: its code is run as it stands there, against the scripted policy and a real shell."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import handlers
from pipeline.config import Config
from pipeline.interfaces import Context
from workers.policy import scripted, tokenizer
from workers.policy.client import VllmPolicy
from workers.sandbox.host import Host

PAGE = Path(__file__).parents[2] / "docs" / "add-a-handler.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("at", "name", "data", "turns"), [(0, "sums:Sums", {"a": 20, "b": 22}, 1), (1, "count_lines:Count", {}, 2)]
)
@pytest.mark.parametrize("p_correct", [1.0, 0.0])
async def test_the_pages_handlers_work(
    tokens: tokenizer.Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    at: int, name: str, data: dict[str, Any], turns: int, p_correct: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "path", list(sys.path))
    for loaded in ("sums", "count_lines"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    handlers._class_of.cache_clear()
    (tmp_path / f"{name.split(':')[0]}.py").write_text(CODE[at])
    handler: Any = handlers.load(name, tmp_path)
    task = handlers.check_task(handler, data)
    answers = {handler.question(task): handler.gold(task)}
    server = await scripted.start(scripted.Options(tokenizer=tokens, answers=answers, p_correct=p_correct))
    policy = VllmPolicy(server.url, "policy", tokens)
    host = await Host.open(Config(), "")
    live = await host.stock.prepare(handler.sandbox, id="g.0", token="x", lane="") if handler.sandbox else None
    ctx = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, task=task, sandbox=live.session if live else None,
        log=logging.LoggerAdapter(logging.getLogger("test")),
    )  # fmt: skip
    ctx._policy = policy.bound(name="g.0-1")
    try:
        await handler.init(ctx)
        await handler.run(ctx)
        assert await handler.eval(ctx) == p_correct
    finally:
        await host.close()
        await policy.close()
        await server.stop()
    trajectory = ctx.trajectory.build()
    assert trajectory.turns == (turns if p_correct else 1) and len(trajectory.sequences) == 1


def test_the_one_turn_handler_is_short() -> None:
    assert len([line for line in CODE[0].splitlines() if line.strip()]) < 30
