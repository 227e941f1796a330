"""What a test run is worth: a signed report or a log, an exit status and the task's lists become a verdict.

Pure functions on plain values. They read what a policy's code wrote, so `judge` is called in a child process. Of pytest
runs the report alone decides (`handlers.swe.signed`); its statuses are given to the task's own parser as lines of a
summary, so that names are cut and changed in the same way as in the task's lists.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from handlers.swe.signed import Facts, facts_of
from pipeline.errors import HandlerError, TaskError

SHOWN = 20
"""Names in a list of the evidence; a count stands beside it."""

PASSING = ("PASSED", "XFAIL")
WORSE = ("XPASS", "PASSED", "XFAIL", "SKIPPED", "FAILED", "ERROR")
"""Where a name stands for several tests, the worst one counts."""

OTHERS = ("parse_log_django", "parse_log_sympy")
"""Parsers of Python's tests that read no pytest log."""

BY_LINES = (*OTHERS, "parse_log_gotest", "parse_log_cargo")
"""These read line by line, so that a log can be read backwards too: a test that has two results in it has failed."""

MISSING = "this task family needs swebench: pip install 'rollout-line[swe]'"


def check_parser(name: str) -> str:
    """The parser of swebench that reads logs of this kind; newer pytest parsers are read by the plain one.

    Raises TaskError for a name that there is not, HandlerError where swebench is not installed. Imports nothing.
    """
    known = _known()
    if name in known:
        return name
    if re.fullmatch(r"parse_log_pytest(_v\d+)?", name):
        return "parse_log_pytest"
    raise TaskError(
        f"log_parser is {name!r}, which swebench does not have: set `log_parser` of the task to one of "
        f"{', '.join(known)}"
    )


def is_pytest(parser: str) -> bool:
    """Whether runs with this parser are pytest's, and so are judged by the report."""
    return parser not in OTHERS and parser in _known()[: _known().index("parse_log_sphinx") + 1]


@functools.cache
def _known() -> tuple[str, ...]:
    """Names of swebench's parsers, those for Python first: out of its source, for the import takes a second."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or spec.origin is None:
        raise HandlerError(MISSING)
    source = Path(spec.origin).with_name("harness") / "log_parsers" / "__init__.py"
    return tuple(re.findall(r'^    "(parse_log_\w+)":', source.read_text(encoding="utf-8"), re.MULTILINE))


def judge(run: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one run, as a map.

    `run`: parser; log, report, key (bytes); exit_code (None: unknown); fail_to_pass, pass_to_pass (names); digests
    (path of a test file -> its SHA-256 in hex before the run), changed (test files that were not left as they were).
    The verdict: resolved, why, forged (why the run can't be believed; "" if it can); fail_to_pass and pass_to_pass
    (shares); passed, ran and failed (numbers of listed tests); failing and not_run (names, at most SHOWN) with their
    counts; last (the test that was running when the report ends). Raises HandlerError without swebench.
    """
    wanted = list(dict.fromkeys([*run["fail_to_pass"], *run["pass_to_pass"]]))
    if is_pytest(run["parser"]):
        facts = facts_of(run["report"], run["key"], run["digests"])
        statuses = read("\n".join(_summary(facts)), run["parser"])
    else:
        facts = Facts(began=True)
        statuses = _both_ways(run["log"].decode("utf-8", "replace"), run["parser"])
        failed = any(status in ("FAILED", "ERROR") for status in statuses.values())
        if statuses and not failed and run["exit_code"] not in (0, None):
            facts.forged = f"the log shows no failure, but the runner's exit status is {run['exit_code']}"
    if run["changed"] and not facts.forged:
        facts.forged = f"the test file {run['changed'][0]} was changed while the tests ran"
    found = {name: status_of(name, statuses) for name in wanted}
    passed = {name for name in wanted if found[name] in PASSING}
    if not is_pytest(run["parser"]):  # as swebench has it: where it passed before, a skip is no regression
        must = set(run["fail_to_pass"])
        passed |= {name for name in wanted if found[name] == "SKIPPED" and name not in must}
    failing = [f"{name} ({found[name]})" for name in wanted if name not in passed and found[name]]
    not_run = [name for name in wanted if not found[name]]
    believed = set() if facts.forged else passed
    resolved = bool(run["fail_to_pass"]) and len(believed) == len(wanted) and not facts.unfinished
    return {
        "resolved": resolved,
        "why": _why(facts, wanted, failing, not_run),
        "forged": facts.forged,
        "fail_to_pass": _share(run["fail_to_pass"], believed),
        "pass_to_pass": _share(run["pass_to_pass"], believed),
        "passed": len(passed),
        "ran": len(wanted) - len(not_run),
        "failed": sum(found[name] == "FAILED" for name in wanted),
        "failing": failing[:SHOWN],
        "failing_count": len(failing),
        "not_run": not_run[:SHOWN],
        "not_run_count": len(not_run),
        "last": facts.last,
    }


def read(log: str, parser: str) -> dict[str, str]:
    """Test -> status, by swebench's parser. What a parser raises on odd text is as if it had found nothing."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError as error:
        raise HandlerError(f"{MISSING} ({error})") from error
    try:
        return {str(name): str(status) for name, status in PARSER_REGISTRY[parser](log, None).items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # a JSON log that was cut, and the like
        return {}


def status_of(name: str, statuses: dict[str, str]) -> str:
    """The status of a listed test, "" where it never ran.

    SWE-bench's lists hold names that were cut within their parameters: such a one stands for all that begin with it.
    """
    if name in statuses:
        return statuses[name]
    if name.count("[") > name.count("]"):
        return max((status for full, status in statuses.items() if full.startswith(name)), key=_rank, default="")
    return ""


def _rank(status: str) -> int:
    return WORSE.index(status) if status in WORSE else len(WORSE)


def _summary(facts: Facts) -> Iterable[str]:
    """The report as lines of pytest's summary: the worst last, for a parser keeps what it reads last."""
    for test, status in sorted(facts.statuses.items(), key=lambda item: _rank(item[1])):
        if status in WORSE[1:]:
            yield f"{status} {test}"


def _both_ways(log: str, parser: str) -> dict[str, str]:
    statuses = read(log, parser)
    if parser in BY_LINES:
        for name, status in read("\n".join(reversed(log.split("\n"))), parser).items():
            if _rank(status) >= _rank("FAILED"):
                statuses[name] = status
    return statuses


def _share(names: list[str], passed: set[str]) -> float:
    names = list(dict.fromkeys(names))
    return round(sum(name in passed for name in names) / len(names), 4) if names else 1.0


def _why(facts: Facts, wanted: list[str], failing: list[str], not_run: list[str]) -> str:
    if facts.forged:
        return f"the run can't be believed: {facts.forged}"
    if not facts.began:
        return "pytest never began to run tests (the end of `log` may say why): there is no report of it"
    if facts.unfinished:
        return facts.unfinished
    wrong = [*failing, *(f"{name} (never ran)" for name in not_run)]
    if wrong:
        return f"{len(wrong)} of {len(wanted)} tests that must pass did not, the first is {wrong[0]}"
    return f"all {len(wanted)} tests that must pass did"
