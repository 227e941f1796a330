"""What every test may rely on: no settings of the person who runs the tests, and nothing of theirs changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drop ROLLOUT_ variables, and point the state folder away from the home."""
    for name in [name for name in os.environ if name.startswith("ROLLOUT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def no_log_level_from_before() -> Iterator[None]:
    """A command that was called in this process sets the level of all logs; the next test wants its own."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
