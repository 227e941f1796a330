"""Reads the signed report of `handlers.swe.pytest_report`: what it says, whether it is whole, whether it was forged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

RANKS = ("PASSED", "XFAIL", "XPASS", "SKIPPED", "FAILED", "ERROR", "NOTHING")

ENDED = {
    2: "the session was interrupted",
    3: "pytest itself broke",
    4: "pytest could not be used as it was called",
    5: "no test was collected",
}


@dataclass
class Facts:
    """What a run showed. `statuses`: test -> pytest's word, the worst where it ran twice.

    `began`: pytest ran at all. `unfinished`: why it did not come to its end ("" if it did). `forged`: why it can't be
    believed. `last`: the test that was running at the end of what is there.
    """

    began: bool = False
    statuses: dict[str, str] = field(default_factory=dict)
    unfinished: str = ""
    forged: str = ""
    last: str = ""


def facts_of(report: bytes, key: bytes, digests: dict[str, str]) -> Facts:
    """What the report says. `digests`: path of a test file, from the repository -> SHA-256 that it must have."""
    records, broken = records_of(report, key)
    facts = Facts(began=bool(records), forged=broken)
    uncollected, broke = "", ""
    ended: int | None = None
    for record in records:
        kind = record["kind"]
        if kind == "begin":
            ended = None
        elif kind == "start":
            facts.last = record["test"]
        elif kind == "test":
            test, status = record["test"], record["status"]
            before = facts.statuses.get(test, status)
            facts.statuses[test] = max(before, status, key=RANKS.index)
            facts.last = ""
        elif kind == "uncollected":
            uncollected = uncollected or f"{record['test']} could not be collected: {record['text'].strip()[-200:]}"
        elif kind == "broken":
            broke = record["text"].strip()[-200:]
        elif kind == "end":
            ended = record["exit"]
        facts.forged = facts.forged or _forged(record, digests)
    if not facts.began:
        return facts
    if ended is None:
        where = f"in {facts.last}" if facts.last else "outside of any test"
        facts.unfinished = f"the test run ended early, {where}: it never came to its end"
    elif ended not in (0, 1):
        told = uncollected or broke
        facts.unfinished = f"{ENDED.get(ended, 'pytest ended')} (exit status {ended}){': ' if told else ''}{told}"
    return facts


def records_of(report: bytes, key: bytes) -> tuple[list[dict[str, Any]], str]:
    """The report's records up to the first that is not signed, and what is wrong from there on ("" if nothing is)."""
    records: list[dict[str, Any]] = []
    before = b""
    for number, line in enumerate(report.split(b"\n")[: report.count(b"\n") + bool(report[-1:].strip())], 1):
        text, _, code = line.rpartition(b" ")
        before = blake2b(before + text, key=key, digest_size=16).digest()
        if code != before.hex().encode("ascii"):
            return records, f"line {number} of the report was not written by the grader"
        records.append(json.loads(text))
        key = blake2b(b"next", key=key, digest_size=32).digest()
    return records, ""


def _forged(record: dict[str, Any], digests: dict[str, str]) -> str:
    """Why this record shows that the run can't be believed; "" where it does not."""
    kind = record["kind"]
    if kind == "forged":
        return str(record["why"])
    if kind == "file":
        for path, digest in digests.items():
            if record["path"].endswith(f"/{path}") and record["digest"] != digest:
                return f"the test file {path} was another one when pytest read it"
    if kind == "canary" and record.get("ran") is not None:
        if record["got"] == "passed" and not record["ran"]:
            return "a test of the grader's passed without being run"
        if record["got"] != "failed" and record["wanted"] == "failed" and record["ran"]:
            return f"a test of the grader's that must fail ended as {record['got']}"
    return ""
