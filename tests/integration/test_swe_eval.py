"""Grading Python tests in real Apptainer: what is right is 1, what only looks right is 0, what broke is neither."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from handlers.swe import test_run
from pipeline.errors import EvaluationTimeout, GraderError, TaskError
from tests.boxes import Site, short_root
from tests.integration.swe_eval_bench import PACKAGE, Bench, Source
from tests.integration.swe_eval_tricks import F2P, QUICK, TEST, TRICKS
from tests.sessions import gone, unique
from tests.swe_task import IMAGES, Instance, sdist, swe_instance

__all__ = ["short_root", "swe_instance"]

SITE = "/opt/env/lib/python3*/site-packages"


@pytest.fixture(scope="session")
def source(swe_instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(sdist(), tmp_path_factory.mktemp("source"), swe_instance.row["patch"])


@pytest.fixture
async def bench(swe_instance: Instance, short_root: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    site = Site(short_root / "host", IMAGES)
    yield Bench(site, swe_instance.row, "apptainer", tmp_path)
    await site.close()


async def test_the_right_patch_is_one(bench: Bench, source: Source, tmp_path: Path) -> None:
    reward = await bench(source.patch({}, gold=True))
    assert reward.value == 1.0, reward
    assert reward.parts == {"resolved": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0, "patch_applies": 1.0}
    evidence = reward.evidence
    assert evidence["why"] == "all 28 tests that must pass did"
    assert (evidence["exit_code"], evidence["failing"], evidence["not_run"], evidence["left_out"]) == (0, [], [], [])
    assert evidence["commands"][0].startswith("pytest --no-header -rA") and len(evidence["log"]) <= 4000
    assert evidence["log_file"] == str(tmp_path / "test.log")
    assert f"PASSED {F2P}" in (tmp_path / "test.log").read_text()


async def test_no_change_is_zero(bench: Bench) -> None:
    reward = await bench(b"")
    assert reward.value == 0.0
    assert reward.parts == {"resolved": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0, "patch_applies": 1.0}
    assert reward.evidence["failing"] == [f"{F2P} (FAILED)"] and reward.evidence["failing_count"] == 1


async def test_the_right_patch_is_one_beside_files_that_are_left_out(bench: Bench, source: Source) -> None:
    edits: dict[str, str | bytes | None] = {"conftest.py": "raise SystemExit(3)\n", "notes.txt": "x"}
    reward = await bench(source.patch(edits, gold=True), state={"left_out": ["tests/render/test_text.py"]})
    assert reward.value == 1.0, reward
    assert reward.evidence["left_out"] == ["conftest.py", "tests/render/test_text.py"]


async def test_a_patch_that_does_not_apply_says_so(bench: Bench, source: Source) -> None:
    patch = source.patch({}, gold=True)
    reward = await bench(patch.replace(b"seen = set()", b"seen = list()"))
    assert reward.value == 0.0 and reward.parts["patch_applies"] == 0.0
    assert reward.evidence["why"].startswith("patch-failed: ") and "dag.py" in reward.evidence["why"]


async def test_a_patch_that_could_not_be_taken_says_so(bench: Bench) -> None:
    reward = await bench(b"", state={"patch_why": "the repository has no .git any more"})
    assert reward.value == 0.0 and reward.parts["patch_applies"] == 0.0
    assert reward.evidence["why"] == "there is no patch to evaluate: the repository has no .git any more"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TRICKS]
)
async def test_a_trick_is_zero(bench: Bench, source: Source, name: str) -> None:
    trick = TRICKS[name]
    reward = await bench(source.patch(trick.edits))
    assert reward.value == 0.0 and reward.parts["resolved"] == 0.0
    assert re.search(trick.why, reward.evidence["why"]), reward.evidence
    assert set(trick.left_out) <= set(reward.evidence["left_out"]), reward.evidence


@pytest.mark.slow
async def test_a_stopped_shell_of_the_graders_changes_nothing(
    bench: Bench, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_run, "LOOK_SECONDS", 5.0)
    monkeypatch.setattr(test_run, "LATE_SECONDS", 1.0)
    stops = """\
import os, signal
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if file.read().startswith((b"bash", b"/bin/bash")) and pid not in (1, os.getpid(), os.getppid()):
            os.kill(pid, signal.SIGSTOP)
"""
    reward = await bench(source.patch({PACKAGE: stops}, gold=True))
    assert reward.value == 1.0 and reward.evidence["exit_code"] is None, reward


@pytest.mark.slow
async def test_a_process_that_stays_is_killed(bench: Bench, source: Source) -> None:
    word = unique(901)
    stays = f"""\
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{word}"])
    os._exit(0)
"""
    reward = await bench(source.patch({PACKAGE: stays}, gold=True))
    assert reward.value == 1.0, reward
    assert await gone(word, 1.0)


async def test_tests_that_hang_are_out_of_time_and_end(bench: Bench, source: Source) -> None:
    word = unique(902)
    hangs = (
        f"+import subprocess, sys\nif 'pytest' in sys.modules:\n    subprocess.Popen(['setsid', 'sleep', '{word}'])\n"
    )
    text = "    def get_children(self, node_key: str)"
    body = (source.folder / "src/pipdeptree/_models/dag.py").read_text()
    assert text in body
    slow = body.replace("        return self.__class__(m)\n", "        while True: pass\n", 1)
    assert slow != body
    patch = source.patch({"src/pipdeptree/_models/dag.py": slow, PACKAGE: hangs[1:]})
    with pytest.raises(
        EvaluationTimeout, match=r"did not end within \d+ s, in tests/_models/test_dag.py::.*fnmatch"
    ) as error:
        await bench(patch, test_timeout=3.0)
    evidence = error.value.evidence
    assert evidence["passed"] >= 1 and evidence["not_run_count"] > 20 and evidence["why"] == str(error.value)
    assert await gone(word, 1.0)


@pytest.mark.parametrize("missing", ["pip", pytest.param("*pytest*", marks=pytest.mark.slow)])
async def test_a_broken_environment_is_no_score(bench: Bench, source: Source, missing: str) -> None:
    """Without pip, which the product imports, no test file can be read; without pytest nothing begins."""
    with pytest.raises(GraderError, match="the environment is broken: with the right patch no test passes either"):
        await bench(source.patch({}, gold=True), before=f"find {SITE}/{missing} -type f -delete")


@pytest.mark.slow
async def test_the_second_attempt_looks_at_the_environment_first(bench: Bench, source: Source) -> None:
    """What the patch breaks must not make the control run fail."""
    breaks = "import glob, shutil, pytest\nshutil.rmtree(pytest.__path__[0])\nimport os\nos._exit(0)\n"
    with pytest.raises(GraderError, match="the environment is broken"):
        await bench(source.patch({PACKAGE: breaks}))
    reward = await bench(source.patch({PACKAGE: breaks}), attempt=2)
    assert reward.value == 0.0 and "tests do pass with the right patch" in reward.evidence["why"]


async def test_nothing_of_the_right_patch_is_seen_by_the_other(bench: Bench, source: Source) -> None:
    """From the second attempt on, the right patch was run in the same sandbox before."""
    looks = """\
import glob, os
compiled = glob.glob("/testbed/src/**/dag.*.pyc", recursive=True)
print("compiled:", compiled, "patches:", len(glob.glob(os.path.expanduser("~/.tests-*/patch.diff"))))
raise ValueError("nothing")
"""
    reward = await bench(source.patch({PACKAGE: looks}), attempt=2)
    assert reward.value == 0.0 and "tests do pass with the right patch" in reward.evidence["why"]
    assert "compiled: [] patches: 1" in reward.evidence["log"], reward.evidence["log"]


@pytest.mark.slow
async def test_a_task_that_is_wrong_says_so(bench: Bench, source: Source) -> None:
    with pytest.raises(TaskError, match="its tests pass with nothing changed"):
        await bench(b"", FAIL_TO_PASS=["tests/_models/test_dag.py::test_package_dag_reverse"])
    with pytest.raises(TaskError, match="field 'test_patch' .* does not apply to the base commit"):
        await bench(b"", test_patch=source.patch({TEST: "x"}).decode().replace("-def test", "-def text"))
    with pytest.raises(TaskError, match="'FAIL_TO_PASS' of .* is empty"):
        await bench(b"", FAIL_TO_PASS=[])
    with pytest.raises(TaskError, match="log_parser is 'parse_log_nose', which swebench does not have"):
        await bench(b"", log_parser="parse_log_nose")


@pytest.mark.slow
async def test_workers_of_xdist_and_variables_of_the_command_change_nothing(bench: Bench, source: Source) -> None:
    command = (
        "PYTHONPATH=src PYTEST_ADDOPTS='-q -rA' python -m pytest tests/_models/test_dag.py tests/render/test_text.py"
    )
    reward = await bench(source.patch({}, gold=True), test_command=command)
    assert reward.value == 1.0, reward
