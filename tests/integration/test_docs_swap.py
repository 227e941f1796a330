"""The page docs/swap-a-handler.md: its files and commands, as they stand there, in an empty folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.browser import require_browser
from tests.services import require

PAGE = (Path(__file__).parents[2] / "docs" / "swap-a-handler.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
FILES = {"python": "train.py", "yaml": "config.yaml", "json": "sql.jsonl"}
SECONDS = 100


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty one, on a short path: sockets lie below it."""
    require_browser()
    require("redis-server")
    with tempfile.TemporaryDirectory(prefix="sw-") as made:
        yield Path(made)


def of(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


def test_the_page_does_what_it_says(folder: Path) -> None:
    here = folder / "here"
    here.mkdir()
    for kind, name in FILES.items():
        (text,) = of(kind)
        (here / name).write_text(text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder), "XDG_RUNTIME_DIR": ""}
    with (folder / "said").open("w+") as said, (folder / "told").open("w+") as told:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", "".join(of("sh"))], cwd=here, env=environ, stdin=subprocess.DEVNULL, stdout=said,
            stderr=told, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait(SECONDS)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
                subprocess.run([Path(sys.executable).parent / "rollout", "redis", "stop"], env=environ, timeout=20)
        for stream in (said, told):
            stream.seek(0)
        lines, log = said.read().splitlines(), told.read()
    assert code == 0, log[-3000:]
    (shown,) = of("")
    rewards = [line for line in lines if " rewards " in line]
    assert sorted(rewards) == sorted(shown.splitlines()), log[-3000:]


def test_one_word_is_all_that_changes() -> None:
    (change,) = [line for text in of("sh") for line in text.splitlines() if line.startswith("sed ")]
    (config,) = of("yaml")
    assert change == "sed -i 's/handler: sql/handler: web/' config.yaml" and config.count("handler: sql") == 1
    assert len([line for line in of("python")[0].splitlines() if line.strip()]) < 16
