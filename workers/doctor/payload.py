"""What `rollout doctor` finds out about the folder of the payload files: whether it is the line's, and its speed."""

from __future__ import annotations

from pipeline import server
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.errors import ConfigError, RedisUnavailable
from pipeline.payload_files import PayloadFiles
from pipeline.queue import Queue
from workers.doctor import Finding

SLOW_MS = 200.0
"""Of one small file: a RUN worker writes one for each large trajectory, beside its other work."""


async def findings(config: Config) -> list[Finding]:
    """Findings about `payload.dir`; none where it is not set and the line has no files. The line is not changed."""
    files = PayloadFiles(config)
    try:
        seconds = await files.run(files.check) if files.on else 0.0
        await _line(config)
    except ConfigError as error:
        return [Finding("payload", "fail", str(error), "see the sentence")]
    if not files.on:
        return []
    text = f"{files.root}: a file was written and flushed in {1000 * seconds:.1f} ms"
    if 1000 * seconds > SLOW_MS:
        return [
            Finding("payload", "warn", text, "put payload.dir on a faster file system, or raise payload.inline_max")
        ]
    return [Finding("payload", "ok", text)]


async def _line(config: Config) -> None:
    """Raises ConfigError where the line's files can't be used here. Where Redis is away, another check says so."""
    config = server.located(config)
    if not config.redis.url:
        return
    client = connect(config)
    try:
        await Queue(client, config).check_files(make=False)
    except RedisUnavailable:
        return
    finally:
        await client.aclose()
