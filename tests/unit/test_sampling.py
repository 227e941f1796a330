"""What one call asks the engine for: known names only, and never more tokens than the window holds."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import ContextFull, TaskError
from workers.policy.sampling import settled

DEFAULTS = {"max_tokens": 32, "temperature": 1.0}


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"temprature": 1.0}, r"sampling\.temprature is no setting \(there are: .*temperature"),
        ({"logprobs": 5}, r"sampling\.logprobs can't be set"),
        ({"max_tokens": 0}, r"sampling\.max_tokens is 0, wanted a whole number of at least 1"),
        ({"max_tokens": True}, r"sampling\.max_tokens is True"),
        ({"min_tokens": -1}, r"sampling\.min_tokens is -1, wanted a whole number of at least 0"),
    ],
)
def test_a_wrong_setting_is_the_tasks_fault(sampling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        settled(sampling, DEFAULTS, 10, 64)


def test_the_budget_is_what_the_window_still_holds() -> None:
    assert settled({}, DEFAULTS, 10, 64)["max_tokens"] == 32
    assert settled({}, DEFAULTS, 40, 64)["max_tokens"] == 24, "field report H05: 40 ids in a window of 64"
    assert settled({}, DEFAULTS, 63, 64)["max_tokens"] == 1
    with pytest.raises(ContextFull, match="the prompt has 64 tokens, the window 64"):
        settled({}, DEFAULTS, 64, 64)
