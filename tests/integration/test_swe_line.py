"""The SWE family through the line, in real Apptainer: a real instance, played by its gold patch and by nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from handlers.swe import Swe, SweTask
from handlers.swe.repository import prepare
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.interfaces import Message
from tests.boxes import short_root
from tests.integration.crew import all_of, configured, serving
from tests.policies import servers
from tests.services import RedisService
from tests.swe_task import IMAGE, WORKDIR, Instance, swe_instance
from workers.policy import tokenizer
from workers.sandbox.box import Spec
from workers.sandbox.boxes import make_driver
from workers.sandbox.tools.session import Session

__all__ = ["short_root", "swe_instance"]


def calling(name: str, **arguments: str) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


SPOILT = f"""\
cd {WORKDIR}; echo 'raise SystemExit' >> tests/_models/test_dag.py; echo 'x = 1' > conftest.py; echo 1 > src/new.py
git checkout -qb mine; git add -A; git commit -qm x; git() {{ echo evil; }}; export GIT_DIR=/nowhere
"""


def plays(gold: list[Message]) -> dict[str, list[Message]]:
    """What the policy does, by name."""
    said: Message = {"role": "assistant", "content": "I am done."}
    return {
        "gold": gold,
        "nothing": [calling("submit")],
        "tests spoilt": [*gold[:-1], calling("bash", command=SPOILT), said],
        "git removed": [*gold[:-1], calling("bash", command=f"rm -rf {WORKDIR}/.git"), calling("submit")],
    }


@pytest.mark.timeout(300)  # eight sandboxes, on a machine that may be busy
async def test_a_real_instance_is_resolved_by_its_gold_patch_alone(
    redis_service: RedisService, swe_instance: Instance
) -> None:
    handler = Swe()
    rows = {
        name: {**swe_instance.row, "problem_statement": f"{name}: {swe_instance.row['problem_statement']}"}
        for name in plays([])
    }
    said = plays(handler.gold(SweTask.model_validate(swe_instance.row)) or [])
    answers = {handler.question(SweTask.model_validate(rows[name])): said[name] for name in rows}
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        tokens = tokenizer.make(Path(folder) / "tokens")
        async with servers(tokens, {"answers": answers, "p_correct": 1.0}) as (server,):
            config = swe_instance.config(configured(
                redis_service, sandbox__root=f"{folder}/s", sandbox__max_live=2, policy__url=server.url,
                policy__tokenizer=f"{folder}/tokens", policy__renderer="qwen3",
            ))  # fmt: skip
            async with RolloutClient(config=config) as client, serving(config, slots=2):
                tasks = [Task(handler="handlers.swe:Swe", data=row) for row in rows.values()]
                found = dict(zip(rows, await all_of(client, tasks, timeout=240), strict=True))
    assert {rollout.outcome for rollout in found.values()} == {"scored"}, found
    rewards = {name: rollout.reward for name, rollout in found.items()}
    evidence: dict[str, Any] = {name: rollout.evidence for name, rollout in found.items()}
    assert rewards == {
        "gold": 1.0, "nothing": 0.0, "tests spoilt": 1.0, "git removed": 0.0,
    }, evidence  # fmt: skip
    assert evidence["tests spoilt"]["left_out"] == ["conftest.py", "tests/_models/test_dag.py"]
    assert "the repository's .git" in evidence["git removed"]["why"]
    assert found["nothing"].parts["pass_to_pass"] == 1.0 and found["nothing"].parts["fail_to_pass"] == 0.0


async def test_h26_holds_in_an_image(short_root: Path, swe_instance: Instance) -> None:
    """An overlay over an image can't always remove folders: what is in them must go nevertheless."""
    config = swe_instance.config(Config())
    box = await make_driver(config, short_root).create(Spec(image=IMAGE, workdir=WORKDIR), "g.0-token")
    session = Session(box, config.sandbox)
    try:
        task = SweTask.model_validate(swe_instance.row)
        for _ in range(2):
            ready = await prepare(session, task)
            assert (ready.start, ready.history) == (swe_instance.base, 2)
            ids = " ".join(swe_instance.fixes.values())
            seen = await session.bash(
                f"for id in {ids}; do git cat-file -t $id 2>&1; done | grep -vc 'could not get object info';"
                "git log --all --oneline | wc -l; git for-each-ref; git remote; git fsck --lost-found --unreachable;"
                "git status --porcelain; git diff; ls notes.local; grep -rl 'The fix' . | wc -l"
            )
            first, *rest = seen.text.splitlines()
            assert first == "0" and rest[0] == "2" and rest[-2:] == ["notes.local", "0"], seen
            assert [line for line in rest[1:-2] if not line.startswith("Checking")] == [
                f"{swe_instance.base} commit\trefs/heads/main"
            ], seen
        used = await session.bash(
            "echo 1 > new; git add new; git commit -qm mine && git checkout -qb b && git gc -q; git status -s"
        )
        assert used == ("", 0, False), "the policy can work with its repository"
    finally:
        await session.close()
        await box.discard()
