"""The test cluster itself: what the other tests here build upon does what it says."""

from __future__ import annotations

from tests.slurm.cluster import Cluster

SLEEPS = "trap 'echo told; exit 0' TERM\necho on $SLURMD_NODENAME\nsleep 300 & wait"


def test_an_array_runs_on_all_nodes_and_is_cancelled(cluster: Cluster) -> None:
    job = cluster.submit(SLEEPS, "--array=1-8", "--cpus-per-task=2")
    rows = cluster.until_running(job, 8)
    assert {row.node for row in rows} == set(cluster.nodes)
    cluster.until(lambda: "on n" in cluster.log(f"{job}_1"), 20.0, "that its trap is set")
    assert {row.id for row in rows} == {f"{job}_{task}" for task in range(1, 9)}
    cluster.cancel(f"{job}_1")
    cluster.until_state(f"{job}_1", "CANCELLED")
    cluster.until(lambda: "told" in cluster.log(f"{job}_1"), 10.0, "its last word")
    assert "told" not in cluster.log(f"{job}_2")


def test_requeued_and_preempted_jobs_run_again(cluster: Cluster) -> None:
    job = cluster.submit(SLEEPS, "--array=1-2", "--partition=low", "--requeue", "--open-mode=append")
    first, second = cluster.until_running(job, 2)
    cluster.requeue(first.id)
    cluster.preempt(second.node, 1)
    cluster.until(lambda: [row.restarts for row in cluster.rows(job)] == [1, 1], 60.0, "two restarts")
    cluster.until_running(job, 2)
    cluster.until(lambda: cluster.log(first.id).count("on n") == 2, 20.0, "the word of its second run")


def test_a_node_that_fails_loses_its_jobs_to_another(cluster: Cluster) -> None:
    job = cluster.submit(SLEEPS, "--requeue")
    (row,) = cluster.until_running(job)
    cluster.until(lambda: len(cluster.processes(row.node)) >= 2, 10.0, "its processes")
    cluster.down_node(row.node)
    cluster.until(lambda: cluster.rows(job)[0].restarts == 1, 60.0, "its restart")
    (again,) = cluster.until_running(job)
    assert again.node != row.node
    cluster.until(lambda: not cluster.processes(row.node), 20.0, "the end of the first copy")


def test_a_killed_node_is_empty_at_once_and_comes_back(cluster: Cluster) -> None:
    job = cluster.submit(SLEEPS, "--no-requeue")
    (row,) = cluster.until_running(job)
    cluster.until(lambda: len(cluster.processes(row.node)) >= 2, 10.0, "its processes")
    cluster.kill_node(row.node)
    assert cluster.processes(row.node) == []
    cluster.start_node(row.node)
    cluster.until_state(job, "NODE_FAIL", "FAILED", "CANCELLED", "COMPLETED")


def test_slurmd_killed_alone_leaves_its_job_running(cluster: Cluster) -> None:
    job = cluster.submit(SLEEPS, "--requeue")
    (row,) = cluster.until_running(job)
    cluster.until(lambda: len(cluster.processes(row.node)) >= 2, 10.0, "its processes")
    cluster.kill_slurmd(row.node)
    cluster.until(lambda: cluster.rows(job)[0].restarts == 1, 60.0, "its second copy")
    cluster.until_running(job)
    assert len(cluster.processes(row.node)) >= 2, "the first copy ended: nothing told it to"
