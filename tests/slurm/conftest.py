"""Fixtures of the Slurm tests: private clusters of 4 and 8 nodes, see cluster.py. Marks every test here as `slurm`.

They run by `make test-slurm`, one after another in one process: a cluster is started once, and emptied after each test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services import require
from tests.slurm.cluster import Cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder is the marker: `pytest -m slurm` finds them all."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[int], Cluster]]:
    """A cluster of so many nodes, started when first asked for; at the end nothing of them may be left."""
    made: dict[int, Cluster] = {}

    def get(size: int) -> Cluster:
        if size not in made:
            for program in ("sbatch", "slurmctld", "slurmd", "munged", "ps"):
                require(program)
            made[size] = Cluster(size)
            made[size].start()
        return made[size]

    yield get
    left = {size: lines for size, cluster in made.items() if (lines := cluster.stop())}
    assert not left, f"processes of these clusters outlived them, and were killed: {left}"


@pytest.fixture
def cluster(clusters: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Four nodes, all idle; afterwards they are so again."""
    yield from _lent(clusters(4), monkeypatch)


@pytest.fixture
def cluster8(clusters: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Eight nodes, all idle; afterwards they are so again."""
    yield from _lent(clusters(8), monkeypatch)


def _lent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in [name for name in os.environ if re.match(r"(SLURM|SBATCH)", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster.conf)
    yield cluster
    cluster.reset()
