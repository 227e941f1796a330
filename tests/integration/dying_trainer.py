"""A trainer that is killed while it moves weights: `python -m tests.integration.dying_trainer REDIS_URL PASSWORD_FILE`.

It prints "moving" once its servers are paused, and waits for its end.
"""

from __future__ import annotations

import asyncio
import sys

from pipeline import RolloutClient
from pipeline.config import Config

DONE_SECONDS, BACKEND_LEASE = 1.0, 1.0


async def main(url: str, password_file: str) -> None:
    about = {"redis.url": url, "redis.password_file": password_file}
    about |= {"lease.done_seconds": DONE_SECONDS, "policy.backend_lease": BACKEND_LEASE}  # type: ignore[dict-item]
    async with RolloutClient(config=Config().changed(about)) as trainer:
        await trainer.start_run(1)

        async def move(_: object) -> None:
            print("moving", flush=True)  # noqa: T201
            await asyncio.Event().wait()

        await trainer.update_weights(2, move=move)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
