"""What every test may rely on: no settings of the person who runs the tests, nothing of theirs changed; a tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.policy import tokenizer


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


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    """A real tokenizer, trained once a process; its folder is `tokens.name_or_path`."""
    return tokenizer.make(tmp_path_factory.mktemp("tokenizer"))
