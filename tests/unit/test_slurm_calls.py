"""Slurm's commands as functions: what they are given, and what becomes of what they refuse.

A stand-in answers in their place, with words that the real ones used; tests/slurm asks the real ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.slurm import calls
from workers.slurm.calls import SlurmAway, SlurmError


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins on PATH, which write down what they are given. `say` below lets them answer."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "sinfo"):
        say(folder, name)
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")
    return folder


def say(folder: Path, name: str, out: str = "", err: str = "", code: int = 0) -> None:
    (folder / f"{name}.out").write_text(out)
    (folder / f"{name}.err").write_text(err)
    path = folder / name
    path.write_text(
        f'#!/bin/bash\nat={folder}/{name}\nprintf "%s\\n" "$@" >>$at.words\nenv >$at.env\n'
        f"[ {name} = sbatch ] && cat >$at.script\ncat $at.out; cat $at.err >&2; exit {code}\n"
    )
    path.chmod(0o755)


def words(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.words").read_text().splitlines()


def test_what_sbatch_is_given(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "1", "SBATCH_PARTITION": "x", "SLURM_CONF": "/c", "TOKEN": "t",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    say(slurm, "sbatch", "12;cluster\n")
    environment = {"PATH": os.environ["PATH"], "HOME": "/h"}
    assert calls.submit("run", "#!/bin/bash\ntext\n", 3, environment, tmp_path) == ["12"]
    assert words(slurm, "sbatch") == ["--parsable", "--export=HOME,PATH", "--array=1-3"]
    assert (slurm / "sbatch.script").read_text() == "#!/bin/bash\ntext\n"
    got = dict(line.partition("=")[::2] for line in (slurm / "sbatch.env").read_text().splitlines())
    assert {name for name in got if name not in ("PWD", "SHLVL", "_")} == {"PATH", "HOME", "SLURM_CONF"}


def test_redis_is_no_array_and_a_large_one_is_cut(slurm: Path, tmp_path: Path) -> None:
    say(slurm, "sbatch", "5\n")
    environment = {"PATH": os.environ["PATH"]}
    calls.submit("redis", "", 1, environment, tmp_path)
    assert words(slurm, "sbatch") == ["--parsable", "--export=PATH"]
    assert calls.submit("run", "", 2001, environment, tmp_path) == ["5", "5", "5"]
    assert [word for word in words(slurm, "sbatch") if "array" in word] == [
        "--array=1-1000", "--array=1-1000", "--array=1-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("err", "said"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "sbatch refused the run jobs: invalid partition specified: nope; Batch job submission failed: Invalid "
            "partition name specified (slurm.partition or slurm.run.partition names it (`sinfo -s` shows those there "
            "are))",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
            "slurm.account",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
            "slurm.run asks",
        ),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)\n", "site"),
        ("sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n", "slurm.run.options"),
        ("sbatch: error: something new\n", "refused the run jobs: something new"),
        ("", "no word"),
    ],
)
def test_what_sbatch_refuses_is_a_sentence(err: str, said: str, slurm: Path, tmp_path: Path) -> None:
    say(slurm, "sbatch", err=err, code=1)
    with pytest.raises(SlurmError) as told:
        calls.submit("run", "", 1, {"PATH": os.environ["PATH"]}, tmp_path)
    assert said in str(told.value)
    assert not isinstance(told.value, SlurmAway)


def test_a_size_that_no_node_has_is_said_with_the_largest_node(slurm: Path, tmp_path: Path) -> None:
    script = "#SBATCH --cpus-per-task=64\n#SBATCH --mem=16384M\n#SBATCH --partition=cpu\n"
    said = "sbatch: error: Batch job submission failed: Requested node configuration is not available\n"
    say(slurm, "sbatch", err=said, code=1)
    environment = {"PATH": os.environ["PATH"]}
    say(slurm, "sinfo", err="sinfo: error: no\n", code=1)
    with pytest.raises(SlurmError, match=r"options\)\). It asks for 64 cores, 16384 MB$"):
        calls.submit("run", script, 1, environment, tmp_path)
    say(slurm, "sinfo", "8 32000\n32+ 8000+\n")
    with pytest.raises(SlurmError, match="16384 MB; the largest node has 32 cores and 8000 MB$"):
        calls.submit("run", script, 1, environment, tmp_path)
    assert "--partition=cpu" in words(slurm, "sinfo")


@pytest.mark.parametrize(
    "err",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "squeue: error: slurm_receive_msg: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
    ],
)
def test_a_controller_that_is_away_is_told_apart(err: str, slurm: Path) -> None:
    say(slurm, "squeue", err=err, code=1)
    with pytest.raises(SlurmAway, match="does not answer"):
        calls.rows("0a1b2c3d")


def test_what_had_ended_is_not_worth_waiting_for(slurm: Path) -> None:
    say(slurm, "squeue", err="slurm_load_jobs error: Socket timed out on send/recv operation", code=1)
    assert calls.rows_if_known("0a1b2c3d") == []


def test_a_command_that_hangs_is_given_up(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LONGEST", 0.2)
    (slurm / "squeue").write_text("#!/bin/bash\nexec sleep 60\n")
    with pytest.raises(SlurmAway, match=r"squeue did not answer within 0.2 s"):
        calls.rows("0a1b2c3d")


def test_what_squeue_shows_is_not_the_users_taste(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%u")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    say(slurm, "squeue", "1_2|RUNNING|1:00|0:10|None|n1|N/A|line-run-0a1b2c3d\n2|RUNNING|1:00|0:10|None|n1|N/A|other\n")
    assert [row.id for row in calls.rows("0a1b2c3d")] == ["1_2"]
    assert not [
        line for line in (slurm / "squeue.env").read_text().splitlines() if line.startswith(("SQUEUE", "SLURM"))
    ]
    assert "--array" in words(slurm, "squeue")  # waiting tasks one by one


def test_what_has_ended_meanwhile_needs_no_cancel(slurm: Path) -> None:
    gone = "scancel: error: Kill job error on job id 9: Invalid job id specified\n"
    say(slurm, "scancel", err=gone, code=1)
    calls.drain(["9", "10_1"])
    assert words(slurm, "scancel") == ["--signal=TERM", "--batch", "9", "10_1"]
    say(
        slurm, "scancel", err=f"{gone}scancel: error: Kill job error on job id 10_1: Access/permission denied\n", code=1
    )
    with pytest.raises(SlurmError, match="Access/permission denied"):
        calls.cancel(["9", "10_1"])


def test_many_tasks_are_ended_in_several_calls(slurm: Path) -> None:
    calls.cancel([])
    assert not (slurm / "scancel.words").exists()
    calls.cancel([str(number) for number in range(401)])
    assert len(words(slurm, "scancel")) == 401


def test_one_reason_of_several_kinds_is_said_once() -> None:
    def refused(kind: str, why: str) -> str:
        return f"sbatch refused the {kind} jobs: {why} (slurm.partition or slurm.{kind}.partition names it)"

    told = {"init": refused("init", "no such"), "run": refused("run", "no such"), "eval": refused("eval", "closed")}
    assert calls.together(told) == [
        "sbatch refused the init, run jobs: no such (slurm.partition or slurm.KIND.partition names it)",
        told["eval"],
    ]


def test_no_slurm_here_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"no sbatch on PATH: type this where Slurm's commands are"):
        calls.require()
    with pytest.raises(SlurmError, match="no sbatch on PATH"):
        calls.rows("0a1b2c3d")
