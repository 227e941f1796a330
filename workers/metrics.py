"""Prometheus metrics of one worker, counted in one place (the loop). Handlers add none."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

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

    def serve(self, port: int, address: str = "127.0.0.1") -> None:
        """Serve /metrics. Raises OSError when the port is taken."""
        start_http_server(port, addr=address, registry=self.registry)
