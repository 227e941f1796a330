"""The same three stages on plain RQ: each job enqueues the next one with its payload; the last one counts."""

from __future__ import annotations

import os

from redis import Redis
from rq import Queue, SimpleWorker

NEXT = {"init": "run", "run": "eval"}


def connection() -> Redis:
    from pipeline.config import load
    from pipeline.connection import connect_sync

    return connect_sync(load())


_CONNECTION: Redis | None = None


def _shared() -> Redis:
    global _CONNECTION
    _CONNECTION = _CONNECTION or connection()
    return _CONNECTION


def stage(name: str, payload: bytes) -> None:
    following = NEXT.get(name)
    if following is None:
        _shared().rpush("rq-done", payload)
        return
    Queue(following, connection=_shared()).enqueue(stage, following, payload, result_ttl=0, description=following)


if __name__ == "__main__":
    SimpleWorker([Queue(os.environ["RQ_STAGE"], connection=_shared())], connection=_shared()).work(
        logging_level="ERROR"
    )
