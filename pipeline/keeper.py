"""Keeps a trainer's leases alive from a thread of its own, while it trains: popped rollouts, a pause of the policy.

With each beat the client says that it lives and what it reads (for `rollout schema`), and hears of a raised schema.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterable

import redis
from redis.exceptions import RedisError

from pipeline.leases import Popped, read_beat
from pipeline.line_schema import package_version
from pipeline.queue import Queue
from pipeline.scripts import run_script

log = logging.getLogger(__name__)


class Keeper(threading.Thread):
    """Beats for popped rollouts until they are acked, and for a pause until it is over.

    `lease` is in seconds; a beat comes every third of it.
    """

    def __init__(self, client: redis.Redis, queue: Queue, consumer: str, lease: float) -> None:
        super().__init__(name=f"keeper-{consumer}", daemon=True)
        self._client = client
        self._queue = queue
        self._consumer = consumer
        self._lease = lease
        self._held: dict[str, Popped] = {}
        self._pausing = self._said_old = False
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def hold(self, leases: Iterable[Popped]) -> None:
        with self._lock:
            self._held.update({lease.id: lease for lease in leases})

    def hold_pause(self, held: bool) -> None:
        """This consumer pauses the policy, or does so no longer."""
        self._pausing = held

    def leases(self, ids: Iterable[str]) -> list[Popped]:
        with self._lock:
            return [self._held[id] for id in ids if id in self._held]

    def ids(self) -> set[str]:
        """All that is held now."""
        with self._lock:
            return set(self._held)

    def forget(self, ids: Iterable[str]) -> None:
        with self._lock:
            for id in ids:
                self._held.pop(id, None)

    def stop(self) -> list[Popped]:
        """End the thread; returns what is still held."""
        self._ending.set()
        self.join(timeout=2)
        self._client.close()
        with self._lock:
            return list(self._held.values())

    def run(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                held = list(self._held.values())
            for at in range(0, max(len(held), 1), 500):
                try:
                    self._beat(held[at : at + 500])
                except Exception as error:  # a keeper that ended would let every popped lease run out
                    log.warning("popped rollouts can't be kept alive now (%s); it is tried again", error)
            try:
                self._keep_pause()
            except Exception as error:
                log.warning("the policy's pause can't be renewed now (%s); it is tried again", error)
            self._ending.wait(self._lease / 3)
        with contextlib.suppress(RedisError, OSError):  # it expires by itself
            self._client.delete(self._queue.key("client", self._consumer))

    def _beat(self, held: list[Popped]) -> None:
        triples = [("done", lease.id, lease.token) for lease in held]
        life = max(1, int(self._lease))
        about = {
            "reads": self._queue.reads, "version": package_version(), "host": socket.gethostname(), "pid": os.getpid(),
            "life": life,
        }  # fmt: skip
        arguments = list(self._queue.beat_arguments(self._consumer, about, triples, life))
        arguments[1] = int(self._lease * 1000)
        reply = run_script(self._client, "beat", self._queue.prefix, tuple(arguments))
        self._queue.hear_schema(read_beat(reply).schema)
        if self._queue.outdated and not self._said_old:
            self._said_old = True
            log.error("%s. What is popped may still be acknowledged", self._queue.too_old())

    def _keep_pause(self) -> None:
        if not self._pausing:
            return
        life = int(self._lease * 1000)
        kept = run_script(self._client, "policy_keep", self._queue.prefix, (self._consumer, life))
        if not kept and self._pausing:  # it may have ended just now
            log.warning("the policy's pause was over before it was renewed: calls go on")
