"""Rank 0 pops and hands on: two real processes of torch.distributed (gloo)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import trainers


def ranks(folder: Path, case: str) -> list[dict[str, Any]]:
    """What each of the two ranks printed; empty for one that was killed. One of them printed something."""
    trainers.require()
    script = str(Path(__file__).parent / "ranks.py")
    both = [
        subprocess.Popen(
            [str(trainers.PYTHON), "-W", "ignore", script, str(rank), str(folder), case], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=trainers.environment(),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert said[0][0] or said[1][0], said[1][1][-4000:]
    return [json.loads(out) if out else {} for out, _ in said]


def test_every_rank_gets_what_rank_zero_fetched_and_takes_its_part(tmp_path: Path) -> None:
    """The fetch lasts longer than the process group's time-out: rank 0 is heard of meanwhile."""
    first, second = ranks(tmp_path, "result")
    assert first["groups"] == second["groups"] == ["a", "b", "c"]
    assert first["ids"] == second["ids"]
    assert (first["mine"], second["mine"]) == (["a"], ["b", "c"])


@pytest.mark.parametrize(
    ("case", "raised", "says"),
    [
        ("error", "Incomplete", "7 of 8 groups came within 5 s"),
        ("unsendable", "ServiceError", "what rank 0 fetched can't be sent to the other ranks"),
    ],
)
def test_what_rank_zero_raises_is_raised_on_every_rank(tmp_path: Path, case: str, raised: str, says: str) -> None:
    for rank in ranks(tmp_path, case):
        assert rank["raised"] == raised
        assert says in rank["says"]
        assert rank["missing"] == ({"s-0-7.0": "in work"} if case == "error" else None)


def test_a_rank_zero_that_dies_leaves_nobody_waiting(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, "dies")
    assert first == {}
    assert second["raised"] == "ServiceError"
    assert "rank 0, which pops for all, was not heard of" in second["says"]
    assert second["seconds"] < 10.0


@pytest.mark.parametrize("case", ["other dies", "other is late"])
def test_rank_zero_says_what_became_of_another_one(tmp_path: Path, case: str) -> None:
    first, _ = ranks(tmp_path, case)
    assert first["raised"] == "ServiceError"
    assert "another rank did not take what rank 0 told it" in first["says"]
    assert first["seconds"] < 10.0
