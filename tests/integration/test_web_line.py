"""The web family through the line, right and wrong answers, and an attempt that is lost. (All three tasks played right:
test_docs_swap.py.)"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers import web
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from tests.integration.browser import require_browser
from tests.integration.crew import all_of, configured, serving
from tests.policies import servers
from tests.services import RedisService
from workers.policy.tokenizer import Tokenizer

TASKS = [json.loads(line) for line in (web.PACKAGE / "tasks.jsonl").read_text("utf-8").splitlines()]

LOSING = """
from handlers.web import Web
from pipeline.errors import PolicyError


class Losing(Web):
    async def _call(self, ctx, do, **given):
        said = await super()._call(ctx, do, **given)
        if ctx.attempt == 1 and ctx.state["web"]["calls"] == 6:
            raise PolicyError("this attempt ends here")
        return said
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: sockets lie under it."""
    require_browser()
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder) / "s"


def of(name: str, **changes: Any) -> dict[str, Any]:
    """The data of one of the tasks, changed."""
    (found,) = [task["data"] for task in TASKS if task["id"] == f"web-{name}"]
    return {**found, **changes}


def known(data: list[dict[str, Any]]) -> dict[str, Any]:
    """What the scripted policy plays for each of these tasks."""
    handler: Any = handlers.load("web")
    checked = [handlers.check_task(handler, item) for item in data]
    return {handler.question(task): handler.gold(task) for task in checked}


async def play(
    service: RedisService, tokens: Tokenizer, root: Path, tasks: list[Task], answers: dict[str, Any], **changes: Any
) -> list[Any]:
    settings = {"sandbox__driver": "bubblewrap", "sandbox__root": str(root), "sandbox__max_live": 2, **changes}
    async with servers(tokens, {}, answers=answers, p_correct=1.0) as (policy,):
        config = configured(
            service, policy__url=policy.url, policy__tokenizer=tokens.name_or_path, policy__renderer="qwen3", **settings
        )
        async with RolloutClient(config=config) as client, serving(config):
            return await all_of(client, tasks, timeout=100)


async def test_gold_is_1_and_what_is_wrong_is_0(
    redis_service: RedisService, tokens: Tokenizer, root: Path, tmp_path: Path
) -> None:
    fields = of("booking")["check"]["fields"]
    data = [
        of("shop"),
        of("museum", question="In which year was the museum's architect born?", answer="1909"),
        of("booking", question="A table for five.", check={"form": "booking", "fields": {**fields, "persons": "5"}}),
    ]
    answers = known(data)
    asked = next(question for question in answers if question.startswith(data[1]["question"]))
    answers[asked] = [*answers[asked][:-1], {"role": "assistant", "content": "<answer>1947</answer>"}]
    tasks = [Task(handler="web", data=item) for item in data]
    done = await play(redis_service, tokens, root, tasks, answers, artifacts__folder=str(tmp_path / "kept"))

    assert [(rollout.outcome, rollout.reward) for rollout in done] == [
        ("scored", 1.0),
        ("scored", 0.0),
        ("scored", 0.0),
    ]
    assert [rollout.evidence["why"] for rollout in done] == [
        "the answer is right and the site was sent what was asked for",
        "the answer is '1947', wanted '1909'",
        "persons is '4', wanted '5'",
    ]
    shop, museum, _ = done
    assert shop.parts == {"answer": 1.0, "state": 1.0} and museum.parts == {"answer": 0.0}
    assert museum.evidence["visited"] == [
        f"http://museum.test/{page}" for page in ("", "building.html", "ada-brandt.html")
    ]
    (shot,) = shop.evidence["screenshots"]
    assert Path(shot["kept"]).is_relative_to(tmp_path / "kept") and Path(shot["kept"]).stat().st_size == shot["bytes"]
    assert shop.trajectory.turns == len(of("shop")["gold"]) + 1


async def test_an_attempt_that_is_lost_is_gone_on_with(
    redis_service: RedisService, tokens: Tokenizer, root: Path, tmp_path: Path
) -> None:
    """The journal answers what was done already: the form is sent once, and the numbers stay what they were."""
    (tmp_path / "losing.py").write_text(LOSING)
    task = Task(handler="losing:Losing", data=of("booking"))
    answers = known([of("booking")])
    (done,) = await play(redis_service, tokens, root, [task], answers, handlers__path=str(tmp_path))
    assert (done.outcome, done.reward) == ("scored", 1.0), done
    run = [attempt for attempt in done.attempts if attempt["stage"] == "run"]
    assert len(run) == 2 and "this attempt ends here" in run[0]["error"], run
    assert done.evidence["browsers"] == 1
    assert done.evidence["calls"] == len(of("booking")["gold"]) + 1 and len(done.evidence["sent"]) == 1
