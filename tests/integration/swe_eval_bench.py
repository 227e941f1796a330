"""Evaluations in real sandboxes without the line: patches made from edits, each played in a sandbox of its own."""

from __future__ import annotations

import logging
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.swe import SweTask
from handlers.swe.evaluate import evaluate
from pipeline.config import Config
from pipeline.interfaces import Context, Reward
from pipeline.log import AttemptLog
from tests.boxes import Site
from tests.swe_task import git
from workers.sandbox.box import Spec
from workers.sandbox.tools.session import Session

PACKAGE = "src/pipdeptree/__init__.py"
"""Imported by every test of the instance, before anything else of the repository is."""


class Source:
    """The instance's repository at its base commit, on this machine: edits become patches."""

    def __init__(self, sdist: Path, folder: Path, gold: str) -> None:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        self.folder = next(folder.iterdir())
        self._gold = gold
        (self.folder / "PKG-INFO").unlink()
        git(self.folder, "init", "-q")
        git(self.folder, "add", "-A", "-f")
        git(self.folder, "commit", "-q", "-m", "base")

    def patch(self, edits: Mapping[str, str | bytes | None], gold: bool = False) -> bytes:
        """The diff that `edits` make (path -> new content, None to delete), on top of the gold patch if asked.

        A text that begins with `+` is put before what is there.
        """
        git(self.folder, "checkout", "-q", "-f", "HEAD")
        git(self.folder, "clean", "-fdqx")
        if gold:
            git(self.folder, "apply", "-", feed=self._gold)
        for name, content in edits.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            elif isinstance(content, bytes):
                path.write_bytes(content)
            elif content.startswith("+"):
                path.write_text(content[1:] + path.read_text())
            else:
                path.write_text(content)
        git(self.folder, "add", "-A", "-f")
        command = ["git", "-C", str(self.folder), "diff", "--cached", "--binary", "--full-index", "HEAD"]
        return subprocess.run(command, capture_output=True, check=True).stdout


class Bench:
    """Evaluates patches of a row. `session` is that of the last evaluation's sandbox, which lives as long as the test.

    `before`: a command that makes each sandbox ready.
    """

    def __init__(self, site: Site, row: Mapping[str, Any], kind: str, artifacts: Path, before: str = "") -> None:
        self._site, self._row, self._kind, self._artifacts, self._before = site, row, kind, artifacts, before
        self._count = 0
        self.session: Any = None

    async def __call__(
        self,
        patch: bytes,
        /,
        *,
        attempt: int = 1,
        state: Mapping[str, Any] | None = None,
        before: str = "",
        **task: Any,
    ) -> Reward:
        """`before`: one more command that is run in the sandbox first; `task`: changes of the row."""
        self._count += 1
        row = {**self._row, **task}
        spec = Spec(image=row["image"]) if self._kind == "apptainer" and "image" in row else Spec()
        box = await self._site.box(self._kind, spec, name=f"g.{self._count}-t")
        self.session = Session(box, Config().sandbox)
        await self.session.start()
        for command in (self._before, before):
            done = await self.session.bash(f"({command or ':'})")
            assert done.exit_code == 0, done
        ctx = Context(
            id="g.0", group="g", sample=0, lane="train", attempt=attempt, task=SweTask.model_validate(row),
            log=AttemptLog(logging.getLogger("test"), rollout="g.0"),
            state={"patch": patch, "left_out": [], "patch_why": "", **(state or {})},
            sandbox=self.session, deadline=600.0, _artifacts=self._artifacts,
        )  # fmt: skip
        try:
            return await evaluate(ctx)
        finally:
            await self.session.close()
