"""Prometheus metrics of one worker, counted in one place (the loop). Handlers add none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from workers.policy.pool import Pool

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1200, 3600)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.5, 2, 10, 60)


class Metrics:
    """Counters by stage. Times are in seconds."""

    def __init__(self, stage: str) -> None:
        self.registry = CollectorRegistry()
        self.stage = stage

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"rollout_{name}", text, ["stage"], registry=self.registry)
            made.labels(stage)
            return made

        self.taken = counter("taken", "rollouts claimed").labels(stage)
        self.committed = counter("committed", "stages finished").labels(stage)
        self.retried = counter("retried", "attempts that will be tried again").labels(stage)
        self.dead = counter("dead", "rollouts that ended as failed").labels(stage)
        self.cancelled = counter("cancelled", "rollouts that ended as cancelled").labels(stage)
        self.stale = counter("stale", "results refused because the lease was no longer ours").labels(stage)
        self.swallowed = counter("swallowed", "attempts that went on after their cancel").labels(stage)
        self.waiting = self._histogram("waiting_seconds", "time from ready to claimed", _SECONDS)
        self.working = self._histogram("working_seconds", "working time of an attempt", _SECONDS)
        self.lag = self._histogram("loop_lag_seconds", "how late the event loop turns", _LAG)
        self.running = Gauge("rollout_running", "rollouts in work", ["stage"], registry=self.registry).labels(stage)
        self.length = Gauge("rollout_queue_length", "rollouts that wait", ["stage", "lane"], registry=self.registry)
        self.age = Gauge(
            "rollout_queue_age_seconds",
            "how long the oldest group's rollout waits",
            ["stage", "lane"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rollout_{name}", text, ["stage"], registry=self.registry, buckets=buckets).labels(self.stage)

    def watch(self, pool: Pool) -> None:
        """Show what this process's pool of policy servers counts."""
        self.registry.register(PolicyMetrics(pool, self.stage))

    def serve(self, port: int, address: str = "127.0.0.1") -> None:
        """Serve /metrics. Raises OSError when the port is taken."""
        start_http_server(port, addr=address, registry=self.registry)


_COUNTED = {
    "policy_calls": ("calls sent to policy servers, repeats included", "calls", ""),
    "policy_repeats": ("calls that a server did not answer, by fault", "repeats", "fault"),
    "policy_ejections": ("servers that stopped to get calls, by fault", "ejections", "fault"),
    "policy_waits": ("calls that had to wait for a server", "waits", ""),
    "policy_brought_up": ("servers that this worker brought up to the weights in force", "brought up", ""),
    "policy_prompt_tokens": ("tokens of prompts, as sent", "prompt tokens", ""),
    "policy_sampled_tokens": ("tokens that came back", "sampled tokens", ""),
}
"""Name -> text, name in the pool's counts, label of what follows that name there."""


class PolicyMetrics(Collector):
    """The pool counts; this shows it."""

    def __init__(self, pool: Pool, stage: str) -> None:
        self._pool, self._stage = pool, stage

    def collect(self) -> Iterator[Metric]:
        counts, fleet = dict(self._pool.fleet.counts), self._pool.fleet
        for name, (text, counted, label) in _COUNTED.items():
            family = CounterMetricFamily(f"rollout_{name}", text, labels=["stage", label] if label else ["stage"])
            if label:
                for key, value in counts.items():
                    if key.startswith(f"{counted} "):
                        family.add_metric([self._stage, key.removeprefix(f"{counted} ")], value)
            else:
                family.add_metric([self._stage], counts.get(counted, 0))
            yield family
        waiting = GaugeMetricFamily("rollout_policy_waiting", "calls that wait for a server", labels=["stage"])
        waiting.add_metric([self._stage], self._pool.waiting)
        usable = GaugeMetricFamily("rollout_policy_usable", "servers that take calls now", labels=["stage"])
        usable.add_metric([self._stage], len(fleet.usable()))
        running = GaugeMetricFamily("rollout_policy_running", "calls in flight", labels=["stage", "backend"])
        for server in list(fleet.servers.values()):
            running.add_metric([self._stage, server.id], len(server.calls))
        yield from (waiting, usable, running)
