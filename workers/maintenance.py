"""The maintenance plane: an RQ worker for the jobs of this machine, and the clock that enqueues them (`rq.cron`).

Each maintenance worker serves one queue, `LINE:maint:MACHINE`: with more than one, RQ loses what it popped when it is
killed. Jobs are names without arguments, packed by msgpack: no pickle is read from Redis. A job's id names its period,
and RQ takes an id once (`unique`): so a machine's jobs run once a period on it however many workers it has, and the
line's jobs (audit, expire) once a period in all, on the machine whose clock came first.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import msgpack
import redis
from redis.client import PubSub, PubSubWorkerThread
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.cron import CronJob, CronScheduler
from rq.cron_job_registry import add as note_cron_job
from rq.exceptions import DuplicateJobError, StopRequested

from pipeline.config import Config
from pipeline.connection import connect_sync, explain
from workers import maintenance_jobs as jobs
from workers.maintenance_waits import Told, answers

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
    AWAY_WAIT = 1.0
    """Seconds: what is due while Redis is away stays due, and must not be tried without a pause."""

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
        born = away = False
        while not self._over.is_set():
            pause = 0.1
            try:
                if not born:
                    self.register_birth()
                    born = True
                if self.enqueue_jobs():
                    self.save()
                self.heartbeat()
                away = False
            except (RedisError, OSError) as error:
                if not away:
                    log.warning("maintenance is not enqueued for now: %s", explain(error, self._url))
                away, pause = True, self.AWAY_WAIT
            self._over.wait(min(self.LONGEST_WAIT, max(pause, self.calculate_sleep_interval())))
        try:
            self.register_death()
        except (RedisError, OSError) as error:
            log.warning("the maintenance clock could not take leave: %s", explain(error, self._url))


class Maintainer(Worker):
    """RQ's forking worker. A job that is in work when it is told to stop has `grace` seconds, then it is killed.

    `life`: the how many-th worker of this process it is; Redis may still show an earlier one. `told`: of a signal that
    came between two of them.
    """

    max_connection_wait_time = 5.0

    def __init__(self, config: Config, connection: redis.Redis, life: int = 1, told: Told | None = None) -> None:
        name = worker_name(config) + (f".{life}" if life > 1 else "")
        super().__init__(
            [queue_name(config)], name=name, connection=connection, serializer=Msgpack,
            worker_ttl=WORKER_TTL, maintenance_interval=60, job_monitoring_interval=10,
        )  # fmt: skip
        self.stopped = 0
        """The signal that it was told to stop by; 0 as long as it was not."""
        self._patience: threading.Timer | None = None
        self._told = told
        self._config = config
        self._leaving = False

    def _install_signal_handlers(self) -> None:
        super()._install_signal_handlers()  # type: ignore[no-untyped-call]
        if self._told is not None and self._told.signal:
            self.request_stop(self._told.signal, None)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stopped = signum
        self._patience = threading.Timer(self._config.limits.grace, self._lose_patience)
        self._patience.daemon = True
        self._patience.start()
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def work_on(self, level: str) -> None:
        """Work until told to stop, or until RQ gives up, which it does on a Redis that hangs. Raises RedisError."""
        try:
            self.work(logging_level=level)
        except StopRequested:  # by a signal that came before RQ minded it
            self.teardown()
        except (RedisError, OSError):
            if not self._leaving:  # it had hardly begun
                self._leaving = True
                self.unsubscribe()
            raise
        finally:
            if self._patience is not None:
                self._patience.cancel()

    def teardown(self) -> None:
        """As RQ's; a Redis that hangs is waited for no longer than for any reply, and the thread that listens ends."""
        self._leaving = True
        with connect_sync(self._config, name="maint") as self.connection:
            try:
                super().teardown()  # type: ignore[no-untyped-call]
            except (RedisError, OSError):
                self.unsubscribe()
                raise

    def unsubscribe(self) -> None:
        """As RQ's, but the thread that listens closes its connection itself: redis-py can't have two threads do it."""
        listener = cast("PubSubWorkerThread | None", self.pubsub_thread)
        if listener is None or self.pubsub is None:
            return
        with contextlib.suppress(RedisError, OSError):
            self.pubsub.unsubscribe()  # type: ignore[no-untyped-call]
        listener.stop()
        listener.join(1.0)
        connection: Any = self.pubsub.connection
        if listener.is_alive() and connection is not None:  # no reply came to end its wait
            connection.disconnect()
            listener.join(self._config.redis.socket_timeout + 1.0)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: PubSub, pubsub_thread: PubSubWorkerThread) -> None:
        if not self._leaving:  # else its connection was cut (`unsubscribe`)
            super()._pubsub_exception_handler(exc, pubsub, pubsub_thread)

    def _lose_patience(self) -> None:
        grace = self._config.limits.grace
        if self.horse_pid:
            log.warning("the job in work did not end within %g s and is killed; its next period does it", grace)
            self.kill_horse()
            return
        log.warning("Redis did not answer within %g s: this process ends without taking leave", grace)
        logging.shutdown()
        os._exit(128 + signal.SIGINT if self.stopped == signal.SIGINT else 0)


def worker_name(config: Config) -> str:
    """The same process twice is not possible, so this is unique."""
    return f"{queue_name(config)}:{os.getpid()}"


def serve(config: Config, *, burst: bool = False) -> int:
    """Do maintenance until told to stop (`burst`: until nothing is due); the signal that stopped it, or 0.

    Raises RedisUnavailable where Redis stayed away for limits.outage.
    """
    jobs.use(config)
    level = "DEBUG" if log.isEnabledFor(logging.DEBUG) else "WARNING"  # RQ tells of every job four times
    log.info("maintenance: %s, from the queue %s", ", ".join(duty.name for duty in duties(config)), queue_name(config))
    with connect_sync(config, name="maint-clock") as other:
        clock = Clock(config, other)
        if burst:
            clock.enqueue_jobs()
            with connect_sync(config, name="maint") as connection:
                Maintainer(config, connection).work(burst=True, logging_level=level)
            return 0
        with clock:
            return _outlast(config, level)


def _outlast(config: Config, level: str) -> int:
    """One worker of RQ after another, since each gives up on a Redis that hangs; the signal that stopped the last."""
    told = Told()
    for life in itertools.count(1):
        why = "its log says why"
        with connect_sync(config, name="maint") as connection:
            worker = Maintainer(config, connection, life, told)
            try:
                worker.work_on(level)
            except (RedisError, OSError) as error:
                why = explain(error, config.redis.url)
        if worker.stopped:
            return worker.stopped
        told.listen()
        log.warning("the maintenance worker gave up on Redis (%s): another one begins when it answers", why)
        if not answers(config, told):
            return told.signal
    raise AssertionError("counting does not end")
