"""A trainer for storms: `python -m tests.faults.storm_trainer SETTINGS FOLDER VERSION MODES EVENTS`.

It starts a run at VERSION and updates the weights again and again, in form "load", with one of MODES (comma-separated),
until it is killed. EVENTS gets a line for each step: `begins|holds VERSION UNIX_TIME`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

from pipeline import RolloutClient
from pipeline.config import Config
from pipeline.errors import LineError


def folder_of(place: Path, version: int) -> str:
    path = place / f"weights-{version}"
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").touch()
    return str(path)


async def main(settings: str, place: str, first: str, modes: str, events: str) -> None:
    version, log = int(first), Path(events)

    def say(what: str) -> None:
        with log.open("a") as out:
            out.write(f"{what} {version} {time.time()}\n")

    async with RolloutClient(config=Config().changed(json.loads(settings))) as line:
        say("begins")
        while True:
            try:
                await line.start_run(version, path=folder_of(Path(place), version))
                break
            except LineError as error:
                print(f"start {version}: {error}", flush=True)  # noqa: T201
        say("holds")
        while True:
            await asyncio.sleep(random.uniform(0.0, 0.4))
            version += 1
            try:
                mode = random.choice(modes.split(","))
                await line.update_weights(version, path=folder_of(Path(place), version), mode=mode)  # type: ignore[arg-type]
            except LineError as error:
                print(f"update {version}: {error}", flush=True)  # noqa: T201
                continue
            say("holds")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
