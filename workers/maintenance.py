"""The maintenance plane: an RQ worker for the jobs of this machine, and the clock that enqueues them (`rq.cron`).

Each maintenance worker serves one queue, `LINE:maint:MACHINE`: with more than one, RQ loses what it popped when it is
killed. Jobs are names without arguments, packed by msgpack: no pickle is read from Redis. A job's id names its period,
and RQ takes an id once (`unique`): so a machine's jobs run once a period on it however many workers it has, and the
line's jobs (audit, expire) once a period in all, on the machine whose clock came first.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgpack
import redis
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.cron import CronJob, CronScheduler
from rq.cron_job_registry import add as note_cron_job
from rq.exceptions import DuplicateJobError

from pipeline.config import Config
from pipeline.connection import connect_sync, explain
from pipeline.errors import RedisUnavailable
from workers import maintenance_jobs as jobs

log = logging.getLogger(__name__)

DAY = 86400
WORKER_TTL = 60
"""Seconds after which a silent worker is not shown any more; a Redis that hangs is noticed about as soon."""
JOB_SECONDS = {"prefetch": 2 * 3600, "evict": 3600, "sweep": 600, "expire": 600, "audit": 1800}
"""Longest time of each job; RQ kills it then."""


class Msgpack:
    """RQ's serializer: numbers, texts, lists and maps."""

    @staticmethod
    def dumps(data: Any, /) -> bytes:
        return bytes(msgpack.packb(data, use_bin_type=True))

    @staticmethod
    def loads(data: bytes, /) -> Any:
        return msgpack.unpackb(data, raw=False)


@dataclass(frozen=True, slots=True)
class Duty:
    """One job: how often (s), and whether every machine does it or one for the whole line."""

    job: Callable[[], Any]
    seconds: int
    everywhere: bool

    @property
    def name(self) -> str:
        return self.job.__name__


def duties(config: Config) -> list[Duty]:
    """What is done, and how often. Prefetching is asked for often: an image that is there costs a look."""
    looks = max(1, round(config.sandbox.sweep))
    return [
        *([Duty(jobs.prefetch, 600, True)] if config.images.prefetch else []),
        Duty(jobs.evict, 600, True),
        Duty(jobs.sweep, looks, True),
        Duty(jobs.expire, 3600, False),
        Duty(jobs.audit, 900, False),
    ]


def queue_name(config: Config, machine: str = "") -> str:
    """The queue of a machine (this one unless named), under the line's name."""
    return f"{config.line.name}:maint:{machine or socket.gethostname()}"


class Due(CronJob):
    """A cron job of RQ whose job ids name the period, so that it is enqueued once however many clocks tick."""

    def __init__(self, config: Config, duty: Duty) -> None:
        where = socket.gethostname() if duty.everywhere else "all"
        self._job = duty.job
        often = duty.seconds < 600
        super().__init__(
            queue_name=queue_name(config), func=duty.job, interval=duty.seconds, job_timeout=JOB_SECONDS[duty.name],
            # The result must outlast the period: while it is kept, its id is taken.
            result_ttl=1200 if often else max(DAY, 2 * duty.seconds), failure_ttl=3600 if often else 7 * DAY,
            ttl=2 * max(duty.seconds, 60), name=f"{config.line.name}:{duty.name}:{where}",
        )  # fmt: skip

    def job_id(self, moment: float) -> str:
        """The same for every clock within a period."""
        return re.sub(r"[^A-Za-z0-9_-]", "-", f"{self.name}-{int(moment // (self.interval or 1))}")

    def enqueue(self, connection: redis.Redis) -> Any:
        """As RQ's own does, but through our serializer and once a period; None when this period's is there."""
        queue = Queue(self.queue_name, connection=connection, serializer=Msgpack)
        try:
            job = queue.enqueue(
                self._job, job_id=self.job_id(time.time()), unique=True, description=self.name, **self.job_options
            )
        except DuplicateJobError:
            return None
        note_cron_job(self.name, connection)
        log.debug("%s is enqueued", self.name)
        return job


class Clock(CronScheduler):
    """RQ's cron in a thread beside the worker; it outlasts a Redis that is away."""

    LONGEST_WAIT = 5.0

    def __init__(self, config: Config, connection: redis.Redis) -> None:
        super().__init__(connection, logging_level=logging.WARNING, name=worker_name(config))
        self._cron_jobs = [Due(config, duty) for duty in duties(config)]
        self._url = config.redis.url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maintenance-clock", daemon=True)

    def __enter__(self) -> Clock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        born = False
        while not self._over.is_set():
            try:
                if not born:
                    self.register_birth()
                    born = True
                if self.enqueue_jobs():
                    self.save()
                self.heartbeat()
            except (RedisError, OSError) as error:
                log.warning("maintenance is not enqueued for now: %s", explain(error, self._url))
            self._over.wait(min(self.LONGEST_WAIT, max(0.1, self.calculate_sleep_interval())))
        try:
            self.register_death()
        except (RedisError, OSError) as error:
            log.warning("the maintenance clock could not take leave: %s", explain(error, self._url))


class Maintainer(Worker):
    """RQ's forking worker. A job that is in work when it is told to stop has `grace` seconds, then it is killed."""

    def __init__(self, config: Config, connection: redis.Redis) -> None:
        super().__init__(
            [queue_name(config)], name=worker_name(config), connection=connection, serializer=Msgpack,
            worker_ttl=WORKER_TTL, maintenance_interval=60, job_monitoring_interval=10,
        )  # fmt: skip
        self._grace = config.limits.grace
        self.stopped = 0
        """The signal that it was told to stop by; 0 as long as it was not."""

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stopped = signum
        patience = threading.Timer(self._grace, self._lose_patience)
        patience.daemon = True
        patience.start()
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def _lose_patience(self) -> None:
        if self.horse_pid:
            log.warning("the job in work did not end within %g s and is killed; its next period does it", self._grace)
            self.kill_horse()


def worker_name(config: Config) -> str:
    """The same process twice is not possible, so this is unique."""
    return f"{queue_name(config)}:{os.getpid()}"


def serve(config: Config, *, burst: bool = False) -> int:
    """Do maintenance until told to stop (`burst`: until nothing is due); the signal that stopped it, or 0.

    Raises RedisUnavailable when it ended by itself: RQ gives up on a Redis that hangs; whoever started it repeats it.
    """
    jobs.use(config)
    level = "DEBUG" if log.isEnabledFor(logging.DEBUG) else "WARNING"  # RQ tells of every job four times
    log.info("maintenance: %s, from the queue %s", ", ".join(duty.name for duty in duties(config)), queue_name(config))
    with connect_sync(config, name="maint") as connection, connect_sync(config, name="maint-clock") as other:
        worker = Maintainer(config, connection)
        clock = Clock(config, other)
        if burst:
            clock.enqueue_jobs()
            worker.work(burst=True, logging_level=level)
            return 0
        with clock:
            worker.work(logging_level=level)
        if not worker.stopped:
            raise RedisUnavailable("the maintenance worker gave up on Redis (its log says why): start it again")
        return worker.stopped
