"""Runners other than pytest, in bubblewrap and Apptainer; and time-outs of evaluations through the line."""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import handlers
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.errors import EvaluationTimeout, GraderError
from tests.boxes import Site, image_cache, short_root
from tests.integration.crew import all_of, configured, serving
from tests.integration.swe_eval_bench import Bench
from tests.integration.swe_eval_handlers import FIXED, MAKE, PRODUCT, ROW, product
from tests.services import RedisService, require
from tests.sessions import gone, unique

__all__ = ["image_cache", "short_root"]

PASSES = 'printf -- "--- PASS: TestValue (0.00s)\\n--- PASS: TestOther (0.00s)\\n"\n'
HERE = Path(__file__).parent


@pytest.fixture(params=["bubblewrap", "apptainer"])
async def bench(
    request: pytest.FixtureRequest, short_root: Path, image_cache: Path, tmp_path: Path
) -> AsyncIterator[Bench]:
    require("git")
    site = Site(short_root / "host", image_cache)
    yield Bench(site, ROW, request.param, tmp_path, MAKE)
    await site.close()


@pytest.fixture
async def boxed(short_root: Path, image_cache: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    """For what does not depend on the driver."""
    site = Site(short_root / "host", image_cache)
    yield Bench(site, ROW, "bubblewrap", tmp_path, MAKE)
    await site.close()


async def test_the_right_patch_is_one_and_what_it_starts_is_killed(bench: Bench) -> None:
    words = [unique(911), unique(912), unique(913)]
    starts = f"sleep {words[0]} & (setsid sleep {words[1]} &) ; env -i setsid sleep {words[2]} &\n"
    reward = await bench(product(FIXED + starts))
    assert reward.value == 1.0, reward
    assert reward.evidence["why"] == "all 2 tests that must pass did"
    for word in words:
        assert await gone(word, 1.0)


async def test_out_of_time_everything_ends(bench: Bench) -> None:
    word = unique(914)
    with pytest.raises(EvaluationTimeout, match="the tests did not end within") as error:
        await bench(product(f"value() {{ sleep {word}; }}\nother() {{ echo 3; }}\n"), test_timeout=1.0)
    assert error.value.evidence["passed"] == 1 and error.value.evidence["not_run"] == ["TestValue"]
    assert "--- PASS: TestOther" in error.value.evidence["log"]
    assert await gone(word, 1.0)


async def test_the_runner_has_nothing_of_the_grader_s_shell(boxed: Bench) -> None:
    says = (
        "{ readlink /proc/self/fd/0; read -r x; echo read:$?; [ -t 1 ] && echo terminal; set | grep ^rollout_before; }"
    )
    alone = "read -r _ _ _ _ _ session _ < /proc/self/stat; [ $session = $$ ] && echo alone"
    reward = await boxed(product(FIXED), test_command=f"{says}; {alone}; bash run.sh")
    assert reward.value == 1.0, reward
    log = reward.evidence["log"]
    assert "/dev/null\nread:1\n" in log and "alone" in log and "terminal" not in log and "rollout_before" not in log


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PASSES + PRODUCT, r"1 of 2 tests that must pass did not, the first is TestValue \(FAILED\)"),
        (f"trap '{PASSES.strip()}' EXIT\n" + PRODUCT, r"1 of 2 tests .* TestValue \(FAILED\)"),
        (PASSES + "exit 3\n", "the log shows no failure, but the runner's exit status is 3"),
        ("exit 0\n", r"2 of 2 tests that must pass did not, the first is TestValue \(never ran\)"),
        ("echo >> run.sh\n" + FIXED, "the test file run.sh was changed while the tests ran"),
    ],
)
async def test_printed_lines_and_exits_are_zero(boxed: Bench, text: str, why: str) -> None:
    reward = await boxed(product(text))
    assert reward.value == 0.0
    assert re.search(why, reward.evidence["why"]), reward.evidence


async def test_an_endless_log_is_cut_and_the_score_stays(boxed: Bench) -> None:
    reward = await boxed(product("head -c 25000000 /dev/zero | tr '\\0' x; echo\n" + FIXED))
    assert reward.value == 1.0, reward
    assert reward.evidence["log_cut_bytes"] > 3_000_000 and len(reward.evidence["log"]) <= 4000


async def test_a_runner_that_prints_no_test_is_no_score(boxed: Bench) -> None:
    with pytest.raises(GraderError, match="the environment is broken: with the right patch no test passes either"):
        await boxed(product(FIXED), test_command="true")
    with pytest.raises(GraderError, match="on the base commit no test passes either"):
        await boxed(product(FIXED), test_command="true", patch="")


# -- through the line --------------------------------------------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder) / "s"


def given(patch: bytes) -> Task:
    data = {**ROW, "given": patch.decode(), "test_timeout": 0.5}
    return Task(handler="swe_eval_handlers:Given", data=data)


@pytest.mark.parametrize("rule", ["zero", pytest.param("mask", marks=pytest.mark.slow)])
async def test_a_time_out_is_evaluated_twice_and_scored_as_the_site_wants_it(
    redis_service: RedisService, root: Path, rule: str
) -> None:
    config = configured(
        redis_service, sandbox__root=str(root), sandbox__driver="bubblewrap", sandbox__max_live=2, retry__backoff=0.01,
        limits__eval_timeout=rule, handlers__path=str(HERE), handlers__load=["swe_eval_handlers:Given"],
    )  # fmt: skip
    task = given(product("value() { sleep 60; }\nother() { echo 3; }\n"))
    found = {"line": config.line.name, "handler": handlers.digest_of(task.handler, str(HERE)), "seconds": 0.1, "at": ""}
    async with RolloutClient(config=config) as client, serving(config):
        validated, stranger = await all_of(client, [replace(task, validated=found), task], timeout=90.0)
    for rollout in (validated, stranger):
        assert [attempt["stage"] for attempt in rollout.attempts] == ["init", "run", "eval", "eval"], rollout.attempts
    if rule == "zero":
        assert (validated.outcome, validated.reward, validated.parts) == ("scored", 0.0, {"timeout": 1.0}), validated
        assert validated.evidence["not_run"] == ["TestValue"] and "did not end within" in validated.evidence["why"]
    for rollout in [stranger] if rule == "zero" else [validated, stranger]:
        assert (rollout.outcome, rollout.reward) == ("failed", None) and rollout.failure is not None, rollout
        assert rollout.failure.kind == "limit" and "the tests did not end within" in rollout.failure.why
