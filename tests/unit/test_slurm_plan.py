"""What is submitted and what is ended, for what is wanted and what squeue says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.slurm.plan import COMPLETING_COUNTS, Plan, plan
from workers.slurm.rows import Row
from workers.slurm.state import Kind, State

NOW = 1_000_000.0
TAG = "0a1b2c3d"


def state(**sizes: int) -> State:
    return State(
        line="line", folder="/f", tag=TAG, overlap=600.0, patience=90.0,
        kinds={kind: Kind(jobs=jobs, text="") for kind, jobs in sizes.items()},
    )  # fmt: skip


def row(
    id: str,
    state: str = "RUNNING",
    left: float | None = 7200.0,
    used: float = 3600.0,
    kind: str = "run",
    reason: str = "None",
) -> Row:
    return Row(id=id, kind=kind, state=state, left=left, used=used, reason=reason, node="n1", name=f"line-{kind}-{TAG}")


def test_what_is_missing_is_submitted_by_kind() -> None:
    made, after = plan(state(redis=1, run=3, eval=2), [row("1_1"), row("2", kind="redis")], NOW)
    assert made == Plan(submit={"run": 2, "eval": 2})
    assert after == state(redis=1, run=3, eval=2)


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (row("1", left=601.0), 0),
        (row("1", left=600.0), 1),  # near its end: it goes on, and is replaced
        (row("1", left=0.0), 1),
        (row("1", left=None), 0),  # no limit
        (row("1", "PENDING"), 0),
        (row("1", "PENDING", left=10.0), 0),  # its time has not begun
        (row("1", "REQUEUED"), 0),
        (row("1", "CONFIGURING"), 0),
        (row("1", "SUSPENDED"), 0),
        (row("1", "PENDING", reason="JobHeldUser"), 0),  # a person holds it
        (row("1", "CANCELLED"), 1),
        (row("1", "NODE_FAIL"), 1),
        (row("1", "PREEMPTED"), 1),
        (row("1", "TIMEOUT"), 1),
        (row("1", "COMPLETED"), 1),
        (row("1", "FAILED"), 1),
    ],
)
def test_what_counts(found: Row, missing: int) -> None:
    made, _ = plan(state(run=1), [found], NOW)
    assert made == Plan(submit={"run": missing} if missing else {})


def test_one_that_ends_counts_for_a_while_since_it_may_be_requeued() -> None:
    made, after = plan(state(run=1), [row("1", "COMPLETING")], NOW)
    assert made == Plan()
    assert plan(after, [row("1", "COMPLETING")], NOW + COMPLETING_COUNTS)[0] == Plan(submit={"run": 1})
    assert plan(after, [row("1", "PENDING")], NOW + 5)[1].completing == {}


def test_too_many_go_the_waiting_ones_first_then_those_that_end_soonest() -> None:
    rows = [
        row("1_1", left=None),
        row("1_2", left=5000.0),
        row("1_3", left=4000.0),
        row("2_1", "PENDING"),
        row("2_2", "PENDING"),
    ]
    assert plan(state(run=4), rows, NOW)[0] == Plan(cancel=["2_2"])
    assert plan(state(run=2), rows, NOW)[0] == Plan(cancel=["2_2", "2_1"], drain=["1_3"])
    assert plan(state(run=1), rows, NOW)[0] == Plan(cancel=["2_2", "2_1"], drain=["1_3", "1_2"])


def test_one_that_has_just_begun_is_cancelled_since_a_signal_may_be_too_early() -> None:
    rows = [row("1_1", used=14.0), row("1_2", used=15.0)]
    assert plan(state(run=0), rows, NOW)[0] == Plan(cancel=["1_1"], drain=["1_2"])


def test_no_worker_goes_for_one_that_has_ended_already() -> None:
    assert plan(state(run=1), [row("1_1"), row("1_2", "COMPLETING")], NOW)[0] == Plan()


def test_one_near_its_end_is_left_to_it_as_long_as_any_is_wanted() -> None:
    rows = [row("1_1", left=300.0), row("2_1")]
    assert plan(state(run=1), rows, NOW)[0] == Plan()
    assert plan(state(run=0), rows, NOW)[0] == Plan(drain=["1_1", "2_1"])


def test_nobody_is_told_twice_and_who_does_not_go_is_cancelled() -> None:
    rows = [row("1_1"), row("1_2", left=5000.0)]
    made, after = plan(state(run=1), rows, NOW)
    assert made == Plan(drain=["1_2"])
    assert plan(after, rows, NOW + 90)[0] == Plan()
    assert plan(after, rows, NOW + 91)[0] == Plan(kill=["1_2"])
    assert plan(after, [row("1_1")], NOW + 91)[1].draining == {}  # forgotten with Slurm


def test_one_that_was_told_to_go_does_not_count_when_more_are_wanted_again() -> None:
    rows = [row("1_1"), row("1_2", left=5000.0)]
    _, after = plan(state(run=1), rows, NOW)
    assert plan(after.sized({"run": 2}), rows, NOW + 1)[0] == Plan(submit={"run": 1})


def test_one_that_was_told_to_go_and_was_requeued_is_cancelled() -> None:
    _, after = plan(state(run=0), [row("1_1")], NOW)
    assert plan(after, [row("1_1", "PENDING")], NOW + 5)[0] == Plan(cancel=["1_1"])


def test_a_kind_that_nobody_speaks_of_is_left_alone() -> None:
    assert plan(state(init=0), [row("1_1", kind="run")], NOW)[0] == Plan()


def quick(id: str) -> Row:
    return row(id, "FAILED", used=2.0)


def test_a_kind_whose_tasks_end_at_once_is_tried_ever_more_slowly() -> None:
    here, now, gaps = state(run=1), NOW, []
    rows: list[Row] = []
    for number in range(8):
        rows.append(quick(str(number)))
        made, here = plan(here, rows, now)
        assert made == Plan()
        began = now
        while not made.submit:
            now += 10.0
            made, here = plan(here, rows, now)
        gaps.append(now - began)
    assert gaps == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0]
    assert "as soon as they start (the last one: 7, FAILED)" in here.struck["run"].why
    assert here.struck["run"].count == 8


def test_tasks_of_one_try_are_one_failure_however_far_apart_they_end() -> None:
    _, here = plan(state(run=3), [quick("1_1"), row("1_2", used=5.0), row("1_3", used=5.0)], NOW)
    _, here = plan(here, [quick("1_1"), quick("1_2"), row("1_3", used=9.0)], NOW + 4)
    _, here = plan(here, [quick("1_1"), quick("1_2"), quick("1_3")], NOW + 8)
    assert (here.struck["run"].count, here.struck["run"].until) == (1, NOW + 30)
    made, here = plan(here, [quick(f"1_{task}") for task in (1, 2, 3)], NOW + 30)
    assert made.submit == {"run": 3}
    assert plan(here, [quick("2_1")], NOW + 35)[1].struck["run"].count == 2


def test_it_is_trusted_again_once_a_later_task_works() -> None:
    _, struck = plan(state(run=2), [quick("1_1"), row("1_2", used=500.0)], NOW)
    assert struck.struck["run"].count == 1  # that one was there before
    early = plan(struck, [quick("1_1"), row("1_2", used=600.0), row("2_1", used=50.0)], NOW + 100)[1]
    assert "run" in early.struck
    assert plan(struck, [quick("1_1"), row("1_2"), row("2_1", used=60.0)], NOW + 100)[1].struck == {}


@pytest.mark.parametrize("ended", ["CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"])
def test_what_others_end_is_replaced_at_once(ended: str) -> None:
    assert plan(state(run=1), [row("1", ended, used=1.0)], NOW)[0] == Plan(submit={"run": 1})


def test_one_that_slurm_holds_after_it_could_not_start_it_is_such_a_failure() -> None:
    held = row("1", "PENDING", reason="launch failed requeued held")
    made, after = plan(state(run=1), [held], NOW)
    assert made == Plan()
    assert plan(after, [held], NOW + 30)[0] == Plan(submit={"run": 1})
    assert plan(after.sized({"run": 0}), [held], NOW + 30)[0] == Plan(cancel=["1"])


def test_one_that_slurm_forgot_before_anybody_looked_is_such_a_failure() -> None:
    young = replace(state(run=1), young={"1": "run", "2": "eval"})
    made, after = plan(young, [row("3_1", kind="eval")], NOW)
    assert made == Plan()
    assert "1, which Slurm has forgotten already" in after.struck["run"].why
    assert after.young == {"2": "eval"}
    trusted = plan(young, [row("1_1", used=60.0)], NOW)[1]
    assert (trusted.young, trusted.struck) == ({"2": "eval"}, {})
    assert plan(young, [row("1_1", used=59.0)], NOW)[1].young == young.young
    assert plan(replace(young, kinds=state(run=0).kinds), [row("1_1")], NOW)[1].young == {"2": "eval"}  # told to go


def test_a_person_who_asks_again_gets_it_at_once() -> None:
    _, after = plan(state(run=1), [quick("1")], NOW)
    assert plan(after.sized({"run": 1}), [quick("1")], NOW + 1)[0] == Plan(submit={"run": 1})


def test_a_worker_that_was_told_to_go_early_is_no_failure() -> None:
    told = replace(state(run=1), draining={"1_1": NOW - 5})
    assert plan(told, [row("1_1", "COMPLETED", used=3.0), row("1_2")], NOW)[1].struck == {}
