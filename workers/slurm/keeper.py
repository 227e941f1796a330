"""The keeper: looks every slurm.look seconds which jobs are missing or near their end, and submits others in time.

It runs as a thread of `rollout work maint` where that is a job of the line, and as `rollout slurm keep` on a login node
of a site whose compute nodes may not submit. Several may run: they take turns. It needs no Redis.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.config import Config
from pipeline.errors import ConfigError, LineError
from workers.slurm import state as states
from workers.slurm.calls import SlurmAway
from workers.slurm.jobs import Jobs

log = logging.getLogger(__name__)


class Keeper:
    """Keeps the jobs of the line in slurm.folder at their wanted numbers, until `stop`."""

    def __init__(self, config: Config) -> None:
        self._jobs = Jobs(folder_of(config), config.slurm.lock)
        self._look = config.slurm.look
        self._over = threading.Event()
        self._said = ""

    def stop(self) -> None:
        """Let `run` return after the step that it is at."""
        self._over.set()

    def run(self) -> None:
        """Step by step, until told to stop. What goes wrong is logged once, and tried again."""
        log.info("keeping the jobs of %s: a look every %g s", self._jobs.folder, self._look)
        while not self._over.is_set():
            self.step()
            self._over.wait(self._look)

    def step(self) -> None:
        """One look, and what follows from it."""
        try:
            done = self._jobs.step()
        except SlurmAway as error:
            self._trouble(f"{error}; jobs run on meanwhile")
        except LineError as error:
            self._trouble(str(error))
        except Exception:  # whatever it is, the next look may go well, and nobody else keeps the line
            log.exception("a look at the jobs failed")
        else:
            if not done.refused:
                self._said = ""
            for sentence in done.said():
                log.info("%s", sentence)

    def _trouble(self, why: str) -> None:
        if why != self._said:
            log.warning("%s", why)
        self._said = why


class KeeperThread:
    """A keeper beside something else: `with KeeperThread.of_job(config, os.environ):`. Nothing where there is none."""

    def __init__(self, keeper: Keeper | None) -> None:
        self._keeper = keeper
        self._thread = threading.Thread(target=keeper.run, name="slurm-keeper", daemon=True) if keeper else None

    @classmethod
    def of_job(cls, config: Config, environ: Mapping[str, str]) -> KeeperThread:
        """The keeper of a maintenance worker: where it is a job that `rollout slurm up` submitted."""
        name = environ.get("SLURM_JOB_NAME", "")
        if not config.slurm.folder or not environ.get("SLURM_JOB_ID"):
            return cls(None)
        try:
            known = states.read(folder_of(config))
        except ConfigError as error:
            log.error("the jobs of the line are not kept: %s", error)
            return cls(None)
        if known is None or not name.endswith(known.tag):
            return cls(None)  # submitted by hand
        if shutil.which("sbatch") is None:
            log.warning(
                "this node has no sbatch, so nothing that ends is replaced from here: let `rollout slurm keep` run on "
                "a login node"
            )
            return cls(None)
        return cls(Keeper(config))

    @property
    def works(self) -> bool:
        """Whether there is a keeper."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper and self._thread:
            self._keeper.stop()
            self._thread.join(10.0)


def folder_of(config: Config) -> Path:
    """slurm.folder, absolute. Raises ConfigError where it is not set."""
    if not config.slurm.folder:
        raise ConfigError(
            "slurm.folder is empty: name a folder of the line's own on the file system that all nodes share (in "
            "config.yaml, or by --set slurm.folder=...)"
        )
    return Path(os.path.abspath(config.path_of(config.slurm.folder)))
