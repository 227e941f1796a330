"""Programs tested in real sandboxes: right ones, wrong ones, and those that attack what tests them."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import handlers
from pipeline.errors import EvaluationTimeout, GraderError, LineError
from pipeline.interfaces import Context, Reward
from tests.boxes import Site
from tests.services import require
from tests.sessions import gone, image_cache, make, running, short_root, site, unique
from workers.sandbox.tools.session import Session

__all__ = ["image_cache", "short_root", "site"]

SUM = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "2 3", "output": "5"}]}
GOOD = "a, b = map(int, input().split())\nprint(a + b, flush=True)\n"
SECOND = f"{GOOD}\nimport os, time\nif a == 2:\n    "
"""A right program; what follows is done in the second test, after the right answer is printed."""

Judged = Callable[..., Awaitable[Reward]]


async def judged(sandbox: Any, data: dict[str, Any], program: str, deadline: float | None = None) -> Reward:
    handler = handlers.load("handlers.code:Code")
    task = handlers.check_task(handler, {"question": "q", **data})
    ctx = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, task=task, sandbox=sandbox, deadline=deadline,
        log=logging.LoggerAdapter(logging.getLogger("test")),
    )  # fmt: skip
    ctx.state["answer"] = f"So:\n```{task.language}\n{program}\n```\n"
    reward = await handler.eval(ctx)
    assert isinstance(reward, Reward)
    return reward


@pytest.fixture
async def judge(site: Site) -> Judged:
    """Scores a program in one box of bubblewrap, for what leaves the box as it was."""
    session, _ = await make(site, "bubblewrap")
    return functools.partial(judged, session)


@pytest.mark.parametrize("driver", ["bubblewrap", "apptainer"])
async def test_leaving_early_is_no_pass_and_the_record_counts(site: Site, driver: str) -> None:
    session, _ = await make(site, driver)
    judge = functools.partial(judged, session)
    early = await judge(SUM, "import os; os._exit(0)")
    assert (early.value, early.evidence["ran"], early.evidence["passed"]) == (0.0, 1, 0)
    right = await judge(SUM, GOOD)
    assert (right.value, right.evidence["ran"], right.evidence["passed"]) == (1.0, 2, 2)
    assert right.parts == {"correct": 1.0, "passed": 1.0} and right.evidence["why"] == "passed all tests"
    fixed = await judge(SUM, "print(3)")
    assert (fixed.value, fixed.parts, fixed.evidence["ran"]) == (0.0, {"correct": 0.0, "passed": 0.5}, 2)
    assert fixed.evidence["failing"] == {
        "number": 2, "why": "wrong output", "input": "2 3", "expected": "5", "got": "3\n"
    }  # fmt: skip
    assert (await judge({**SUM, "partial": True}, "print(3)")).value == 0.5
    for empty in ("", None):
        nothing = {"tests": [{"fn_name": "f", "args": [], "expected": empty}]}
        raised = await judge(nothing, "def f():\n    raise ValueError('no')")
        assert raised.value == 0.0 and raised.evidence["ran"] == 1
        assert "raised" in raised.evidence["why"] and "ValueError: no" in raised.evidence["stderr"]
        assert (await judge(nothing, "def f():\n    pass")).value == 1.0


async def test_functions(judge: Judged) -> None:
    task = {"fn_name": "f", "tests": [{"args": [[3, 1], 2], "expected": [[1, 3], 2]}]}
    for program in (
        "def f(a, b):\n    print('noise')\n    return tuple([sorted(a), b])",
        "class Solution:\n    def f(self, a: List[int], b: int) -> Any:\n        return sorted(a), b",
        "import atexit, time\natexit.register(time.sleep, 60)\ndef f(a, b):\n    return deque([sorted(a), b])",
    ):
        reward = await judge(task, program)
        assert reward.value == 1.0, reward.evidence
    for program, why in (
        ("def g(a, b):\n    return [[1, 3], 2]", "has no function 'f'"),
        ("def f(a, b):\n    import os\n    os._exit(0)", "before the function returned"),
        ("def f(a, b):\n    exit(0)", "before the function returned"),
        ("def f(a, b):\n    return {1, 3}", "returned a set"),
        ("def f(a, b):\n    return [[1, 3], True]", "something else"),
        ("print([[1, 3], 2])\ndef f(a, b):\n    print([[1, 3], 2])", "something else"),
        ("def f(a):\n    return [[1, 3], 2]", "positional argument"),
    ):
        reward = await judge(task, program)
        assert reward.value == 0.0 and why in f"{reward.evidence['why']} {reward.evidence['stderr']}", reward.evidence


async def test_limits_of_one_test(judge: Judged) -> None:
    quick = {**SUM, "time_limit": 0.5}
    for program, why in (
        ("import time; time.sleep(60)", "still running after "),
        ("while True: print('x' * 10**6)", "printed too much"),
        ("x = bytearray(2 << 30); print(3)", "failed (exit code 1)"),
        ("import os; os.close(1)", "wrong output"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        (f"{GOOD}exit(1)", "failed (exit code 1)"),
        (f"{GOOD}print('noise')", "wrong output"),
        ("", "wrong output"),
        ("def", "failed (exit code 1)"),
    ):
        reward = await judge(quick, program)
        assert reward.value == 0.0 and why in reward.evidence["why"], (program, reward.evidence)
        assert reward.evidence["ran"] == 1, (program, reward.evidence)
    busy = await judge({**SUM, "time_limit": 0.1}, "while True: pass")
    assert busy.value == 0.0 and "over the limit of CPU time" in busy.evidence["why"], busy.evidence
    assert (await judge(SUM, GOOD)).value == 1.0
    nearly = "import time\nwhile time.process_time() < 1.88: pass\n"  # some kernels count a process too fast by 8 %
    assert (await judge({**SUM, "time_limit": 2.0, "tests": SUM["tests"][:1]}, nearly + GOOD)).value == 1.0


async def test_nothing_of_a_test_reaches_the_next(judge: Judged) -> None:
    """Background processes end with their test; folder and program are new each time; stdin may be left unread."""
    word = unique(600)
    daemon = (
        f"\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.execlp('sleep', '-', '{word}')\n"
    )
    reward = await judge(SUM, f"{GOOD}import os{daemon}")
    assert reward.value == 1.0, reward.evidence
    assert await gone(word, 0.0) and not running(word)
    leaves = (
        "import os, sys\nassert not os.listdir()\nopen('left', 'w').write('x')\nopen(sys.argv[0], 'w').write('x')\n"
    )
    assert (await judge(SUM, leaves + GOOD)).value == 1.0
    assert (await judge({"tests": [{"input": "x" * 10**6, "output": "3"}] * 2}, "print(3)")).value == 1.0


async def test_a_fork_bomb_fails_its_test(site: Site) -> None:
    """The sandbox's own limit ends it; it may take what tests it along."""
    session, _ = await make(site, "bubblewrap", processes=64)
    bomb = "import os, time\nwhile True:\n    os.fork() or time.sleep(60)"
    reward = await judged(session, SUM, bomb)
    assert reward.value == 0.0 and reward.evidence["passed"] == 0


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("os.kill(os.getppid(), 9)", "test 2 of 2: the program ended the process that tests it"),
        ("os.kill(os.getppid(), 19); time.sleep(60)", "test 2 of 2: the program stopped the process that tests it"),
        ("os.kill(-1, 9)", "test 2 of 2: the program ended the process that tests it"),
        ("open('/home/agent/.judge/results', 'wb').write(b'x' * 300)", "the program wrote into the results"),
        ("open('/home/agent/.judge/results', 'r+b').write(b'\\0\\0\\0\\2')", ""),
        ("os.chmod('/home/agent', 0)", "the program ended"),
    ],
)
async def test_who_attacks_the_judge_gets_nothing_for_it(site: Site, attack: str, why: str) -> None:
    session, _ = await make(site, "bubblewrap")
    reward = await judged(session, {**SUM, "partial": True}, SECOND + attack)
    assert reward.value < 1 and reward.parts["correct"] == 0.0 and why in reward.evidence["why"], reward.evidence
    assert reward.evidence["failing"]["number"] <= 2


async def test_a_program_that_deletes_everything_is_judged_by_what_it_printed(site: Site) -> None:
    session, _ = await make(site, "bubblewrap")
    removes = "import os; os.system('rm -rf /home/agent/.judge /home/agent/* /tmp/*')\n"
    assert (await judged(session, SUM, removes + GOOD)).value == 1.0
    assert (await judged(session, SUM, f"{removes}print(3)")).evidence["passed"] == 1


@pytest.mark.parametrize("driver", ["bubblewrap", "apptainer"])
async def test_secrets_of_the_judge_are_out_of_reach(site: Site, driver: str) -> None:
    """Neither the job with its key nor the runner's memory can be read by what it runs."""
    program = (
        "import os, sys\nparent, found = os.getppid(), []\n"
        "for name in ('mem', 'environ', 'fd/3', 'maps'):\n"
        "    try:\n        open(f'/proc/{parent}/{name}', 'rb').read(1)\n        found.append(name)\n"
        "    except OSError:\n        pass\n"
        "print(sorted(os.listdir(os.path.dirname(sys.argv[0]) + '/../../..')), found)"
    )
    session, _ = await make(site, driver)
    reward = await judged(
        session, {"tests": [{"input": "", "output": "['results', 'runner.py', 'tests'] []"}]}, program
    )
    assert reward.value == 1.0, reward.evidence


async def test_other_languages(judge: Judged) -> None:
    require("g++")
    cpp = {**SUM, "language": "cpp"}
    right = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    assert (await judge(cpp, right)).value == 1.0
    broken = await judge(cpp, "int main() { return x; }")
    assert broken.value == 0.0 and "does not compile" in broken.evidence["why"]
    assert "'x' was not declared" in broken.evidence["stderr"].replace("\u2018", "'").replace("\u2019", "'")
    assert broken.evidence["ran"] == 0
    shell = {**SUM, "language": "sh", "file": "main.sh", "command": "bash {folder}/main.sh"}
    assert (await judge(shell, "read a b; echo $((a + b))")).value == 1.0


async def test_many_tests_need_no_long_command(site: Site) -> None:
    """Tests that take longer than one command of the sandbox may."""
    session, _ = await make(site, "bubblewrap", command_timeout=1.0)
    many = {"tests": [{"input": f"{n} 1", "output": str(n + 1)} for n in range(12)]}
    began = time.monotonic()
    reward = await judged(session, many, f"import time; time.sleep(0.2)\n{GOOD}")
    assert reward.value == 1.0 and reward.evidence["ran"] == 12, reward.evidence
    assert time.monotonic() - began > 2.4


@pytest.mark.slow
async def test_a_thousand_tests_cost_little_more_than_the_programs(judge: Judged) -> None:
    many = {"tests": [{"input": f"{n} 1", "output": str(n + 1)} for n in range(1000)]}
    began = time.monotonic()
    reward = await judge(many, GOOD)
    assert reward.value == 1.0 and reward.evidence["ran"] == 1000
    assert time.monotonic() - began < 1.5 * reward.evidence["seconds"] + 2


async def test_out_of_time_in_all_is_no_score(judge: Judged) -> None:
    many = {"tests": [{"input": f"{n} 1", "output": str(n + 1)} for n in range(100)]}
    with pytest.raises(EvaluationTimeout, match=r"longer than the stage allows: \d+ of 100 tests had run") as raised:
        await judge(many, f"import time; time.sleep(0.1)\n{GOOD}", deadline=1.0)
    evidence = raised.value.evidence
    assert 0 < evidence["ran"] == evidence["passed"] < 100 == evidence["tests"]


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("PATH=/nowhere", "there is no python3 in the sandbox"),
        ("mkdir b; printf '#!/bin/sh\\necho spoilt; exit 1' >b/python3; chmod +x b/python3; PATH=~/b:$PATH", "spoilt"),
        ("mkdir -p .judge/job", "can't be put into the sandbox"),
    ],
)
async def test_a_broken_sandbox_is_no_score(site: Site, breaks: str, said: str) -> None:
    session: Session
    session, _ = await make(site, "bubblewrap")
    await session.bash(breaks)
    with pytest.raises(LineError, match=said) as raised:
        await judged(session, SUM, GOOD)
    assert isinstance(raised.value, GraderError)


async def test_a_missing_compiler_is_no_score(judge: Judged) -> None:
    task = {**SUM, "language": "x", "file": "main.x", "compile": "no-such-compiler main.x", "command": "{folder}/main"}
    with pytest.raises(GraderError, match="there is no no-such-compiler in the sandbox"):
        await judge(task, "x")


async def test_an_answer_without_a_program(site: Site) -> None:
    handler = handlers.load("handlers.code:Code")
    ctx = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1,
        task=handlers.check_task(handler, {"question": "q", **SUM}),
        log=logging.LoggerAdapter(logging.getLogger("test")),
    )  # fmt: skip
    ctx.state["answer"] = "The sum is easy."
    reward = await handler.eval(ctx)
    assert isinstance(reward, Reward)
    assert (reward.value, reward.evidence["ran"]) == (0.0, 0) and "no closed block" in reward.evidence["why"]
