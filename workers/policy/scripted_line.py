"""A scripted policy server in a line: workers of other machines reach it, and read its tokenizer."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

from pipeline.backends import backend_id
from pipeline.config import TRAINED, Config
from pipeline.engine import Engine
from pipeline.errors import ConfigError
from pipeline.loopback import elsewhere
from pipeline.registration import Registration, looked_at
from workers.listening import Place

log = logging.getLogger(__name__)

PREFIX = "rollout-policy-"


@contextlib.contextmanager
def tokenizer_folder(config: Config, registered: bool) -> Iterator[Path]:
    """An empty folder for the tokenizer, removed at the end.

    `registered`: in the line, whose Redis `config` names. Then it lies in slurm.folder, which all nodes see, where that
    is set; else in TMPDIR, with a warning where workers of other machines may be expected, who can't read it. Raises
    ConfigError where the folder can't be made.
    """
    shared = config.path_of(config.slurm.folder).absolute() if registered and config.slurm.folder else None
    try:
        if shared is not None:
            shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=shared)
    except OSError as error:
        place = "TMPDIR" if shared is None else f"slurm.folder {shared}"
        raise ConfigError(f"{place} can't take the tokenizer: {error.strerror} ({error.filename})") from None
    with made as folder:
        if registered and shared is None and elsewhere(config.redis.url):
            log.warning(
                "RUN workers on other machines can't read the tokenizer in %s, if that is a folder of this machine "
                "alone: set slurm.folder, or TMPDIR, to one that they see too", folder
            )  # fmt: skip
        yield Path(folder)


@contextlib.asynccontextmanager
async def registered(config: Config, at: Place, tokenizer: Path, policy: str = TRAINED) -> AsyncIterator[None]:
    """The server that listens there is in the line's registry while the block runs, by the URL that workers use.

    Raises EngineError (it does not answer), ConfigError, RedisUnavailable.
    """
    async with Engine(at.near, timeout=config.policy.probe_timeout) as engine:
        found = await looked_at(engine, id=backend_id(at.far), tokenizer=str(tokenizer))
    owner = f"scripted-{socket.gethostname()}-{os.getpid()}"
    registration = await Registration(config, replace(found, url=at.far), owner, policy=policy).open()
    try:
        yield
    finally:
        await registration.close()
