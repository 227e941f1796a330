"""A sandbox host for the fault tests: `python -m tests.faults.host_main SETTINGS LOG COUNT`.

Makes and discards sandboxes, COUNT at a time, for ever; each one that answered is a line in LOG. With COUNT 0 it keeps
a single one and writes a line whenever that one has answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pipeline.config import Config
from workers.sandbox.host import Host


async def serve(config: Config, log: Path, count: int) -> None:
    host = await Host.open(config, "")
    number = 0

    async def once(number: int, keep: bool) -> None:
        live = await host.stock.prepare({}, id=f"r.{number}", token="t", lane="train")
        await live.session.bash("sleep 3000 &")
        while True:
            output = await live.session.bash(f"echo said-{number}")
            if output.text != f"said-{number}":
                raise AssertionError(f"sandbox {number} said {output}")
            with log.open("a") as file:
                file.write(f"{number}\n")
            if not keep:
                return await host.stock.discard(live.box.name)
            await asyncio.sleep(0.2)

    while True:
        await asyncio.gather(*(once(number + i, keep=count == 0) for i in range(max(1, count))))
        number += max(1, count)


if __name__ == "__main__":
    asyncio.run(serve(Config().changed(json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])))
