"""squeue's lines as rows: times, states, names of the line's jobs, reasons in words."""

from __future__ import annotations

import time

import pytest

from workers.slurm.rows import Row, moment, parse, seconds, words

TAG = "0a1b2c3d"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0:07", 7.0), ("12:34", 754.0), ("1:00:00", 3600.0), ("2-03:04:05", 183_845.0), ("10-00:00:00", 864_000.0),
        ("UNLIMITED", None), ("NOT_SET", None), ("N/A", None), ("", None), ("INVALID", 0.0),
    ],
)  # fmt: skip
def test_times(text: str, wanted: float | None) -> None:
    assert seconds(text) == wanted


def test_the_time_of_an_end() -> None:
    assert moment("2026-11-30T19:32:27") == time.mktime((2026, 11, 30, 19, 32, 27, 0, 0, -1))
    assert moment("N/A") is None
    (found,) = parse([f"1|FAILED|0:00|0:10|None|n7|2026-11-30T19:32:27|l-run-{TAG}"], TAG)
    assert found.end == moment("2026-11-30T19:32:27")


def row(**changes: object) -> Row:
    about = {"id": "7_1", "kind": "run", "state": "RUNNING", "left": 600.0, "used": 5.0, "reason": "None", "node": "n1"}
    return Row(**{**about, "name": f"line-run-{TAG}", **changes})  # type: ignore[arg-type]


def test_a_line_of_squeue() -> None:
    (found,) = parse([f"12_3|RUNNING|3:59:50|0:10|None|n7|N/A|my-line.x-run-{TAG}\n"], TAG)
    assert found == row(id="12_3", left=14_390.0, used=10.0, node="n7", name=f"my-line.x-run-{TAG}")
    assert found.number == (12, 3)


def test_other_jobs_are_left_alone() -> None:
    others = [
        "1|RUNNING|1:00|0:10|None|n1|N/A|interactive",
        "2_1|RUNNING|1:00|0:10|None|n1|N/A|line-run-ffffffff",  # the same name, another folder
        f"3_1|RUNNING|1:00|0:10|None|n1|N/A|line-train-{TAG}",  # none of the line's kinds
        f"4|RUNNING|1:00|0:10|None|n1|N/A|line-run-{TAG}-mine",
        f"5|RUNNING|1:00|0:10|None|n1|N/A|a|b-line-run-{TAG}x",
        f"6_[1-4]|PENDING|1:00|0:00|Resources||N/A|line-run-{TAG}",  # not by task
        "broken",
        "",
    ]
    assert parse(others, TAG) == []
    assert [found.name for found in parse([*others, f"7|PENDING|1:00|0:00|None||N/A|a|b-redis-{TAG}"], TAG)] == [
        f"a|b-redis-{TAG}"
    ]


def test_rows_come_by_kind_and_age() -> None:
    lines = [f"{id}|PENDING|1:00|0:00|None||N/A|l-{kind}-{TAG}" for id, kind in
             [("10_2", "run"), ("9_1", "run"), ("11", "redis"), ("10_10", "run"), ("3_1", "vllm")]]  # fmt: skip
    assert [found.id for found in parse(lines, TAG)] == ["11", "9_1", "10_2", "10_10", "3_1"]


@pytest.mark.parametrize(
    ("state", "reason", "what"),
    [
        ("PENDING", "Resources", "waits"),
        ("PENDING", "JobHeldUser", "waits"),
        ("REQUEUED", "None", "waits"),
        ("PENDING", "JobHoldMaxRequeue", "held"),
        ("PENDING", "launch failed requeued held", "held"),
        ("REQUEUE_HOLD", "None", "held"),
        ("SPECIAL_EXIT", "None", "held"),
        ("RUNNING", "None", "runs"),
        ("CONFIGURING", "None", "runs"),
        ("SUSPENDED", "None", "runs"),
        ("COMPLETING", "None", ""),
        ("COMPLETED", "None", "over"),
        ("NODE_FAIL", "None", "over"),
        ("PREEMPTED", "None", "over"),
        ("A_STATE_OF_TOMORROW", "None", "over"),
    ],
)
def test_each_state_is_one_thing(state: str, reason: str, what: str) -> None:
    found = row(state=state, reason=reason)
    assert [name for name in ("waits", "held", "runs", "over") if getattr(found, name)] == ([what] if what else [])


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("Resources", "no node has enough free"),
        ("QOSMaxJobsPerUserLimit", "a limit of the account or QOS"),
        ("AssocGrpCpuLimit", "a limit of the account or QOS"),
        ("PartitionTimeLimit", "slurm.run.time"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-4]", "down, drained or reserved"),
    ],
)
def test_reasons_in_words(reason: str, part: str) -> None:
    said = words(row(state="PENDING", reason=reason))
    assert said.startswith(reason)
    assert part in said


def test_a_reason_that_is_not_known_stands_for_itself() -> None:
    assert words(row(reason="BurstBufferStageIn")) == "BurstBufferStageIn"
