"""Mathematics through real workers: the same verdicts every time, and answers that would compute for ever."""

from __future__ import annotations

from typing import Any

import pytest

from handlers import math
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from tests.integration.crew import all_of, configured, serving
from tests.policies import servers
from tests.services import RedisService
from workers.policy.tokenizer import Tokenizer


async def test_verdicts_are_the_same_every_time_whatever_else_is_scored(
    redis_service: RedisService, tokens: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H22, four at a time; then answers that would compute for ever: wrong in time."""
    h22 = [
        ("$\\frac{6}{8}$", "\\boxed{0.75}"),
        ("$x<-2$", "\\boxed{(-\\infty,-2)}"),
        ("$7$", "First \\boxed{7}. Actually \\boxed{9}."),
    ]
    hang = ["9^{9^{9^9}}", "2^{2^{1000}}!"]
    quick = ["\\frac{1}{" * 3000 + "1" + "}" * 3000, "a" * 1900 + "!", "\\sqrt{1+" * 25 + "2" + "}" * 25]
    cases = [*h22 * 4, ("\\frac{1}", "7"), *(("7", f"\\boxed{{{said}}}") for said in [*hang, *quick])]
    answers = {f"Question {n}?": [{"role": "assistant", "content": said}] for n, (_, said) in enumerate(cases)}
    tasks = [
        Task(handler="handlers.math:Math", data={"question": f"Question {n}?", "expected_answer": gold})
        for n, (gold, _) in enumerate(cases)
    ]
    async with servers(tokens, {}, answers=answers, p_correct=1.0) as (server,):
        config = configured(redis_service, policy__url=server.url, policy__tokenizer=tokens.name_or_path)
        async with (
            serving(config, "init", "run"),
            serving(config, "eval", slots=4),
            RolloutClient(config=config) as line,
        ):
            known: list[Any] = await all_of(line, tasks[:13])
            monkeypatch.setattr(math, "GOLD_SECONDS", 10.0)  # the tests' machine may be busy
            found: list[Any] = await all_of(line, tasks[13:])
    assert [rollout.reward for rollout in known] == [1.0, 1.0, 0.0] * 4 + [None], known
    assert (known[-1].failure.kind, known[-1].failure.stage) == ("task", "init")
    assert [rollout.reward for rollout in found] == [0.0] * 5, found
    assert all(" more than " in rollout.evidence["why"] for rollout in found[:2])
