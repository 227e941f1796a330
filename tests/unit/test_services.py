"""A missing service: a skip that names the mend on a laptop, a failure in continuous integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services import require


def test_what_is_there_is_found() -> None:
    assert require("sh").endswith("/sh")


def test_a_missing_service_is_a_skip_with_its_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="redis-server is not on PATH: say `make system`"):
        require("redis-server")


def test_with_ci_it_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="redis-server is not on PATH"):
        require("redis-server")
