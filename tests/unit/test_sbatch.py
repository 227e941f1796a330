"""The batch scripts: they parse, say what a cluster needs, and hand Slurm's signal to the worker itself."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "sbatch"
STAGES = ("init", "run", "eval")
CLIENTS = (*STAGES, "serve")
"""Those that look for the line's Redis; several of each may run."""

SCRIPTS = ("redis", *CLIENTS)


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.sbatch").read_text(encoding="utf-8")


def directives(name: str) -> dict[str, str]:
    """#SBATCH --key=value lines."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text_of(name), re.MULTILINE))


def test_there_are_these_five() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.sbatch")) == sorted(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_can_parse_it(name: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / f"{name}.sbatch"], check=True, timeout=10)


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_careful_and_ends_by_becoming_its_program(name: str) -> None:
    lines = text_of(name).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "set -euo pipefail" in lines
    assert "export PYTHONSAFEPATH=1" in lines
    assert lines[-1].startswith("exec rollout ")
    assert "python -m" not in text_of(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_directives(name: str) -> None:
    found = directives(name)
    assert found["signal"] == "B:TERM@60"
    assert found["open-mode"] == "append"
    assert "requeue" in found
    assert ("array" in found) == (name in CLIENTS)
    assert not {"partition", "account", "chdir", "nodelist"} & set(found), "these belong to one site"


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_names_no_machine(name: str) -> None:
    paths = re.findall(r"(?<![\w$}\"'])/[a-z][\w./-]*", text_of(name))
    assert set(paths) <= {"/bin/bash", "/dev/null"}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_password_is_named_by_its_file_alone(name: str) -> None:
    assert 'PASSWORD_FILE="$LINE_DIR/password"' in text_of(name)
    assert not re.search(r"cat .*password", text_of(name))


def run_script(name: str, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script under bash, with only the given environment and a PATH that begins with `folder`."""
    return subprocess.run(
        ["bash", FOLDER / f"{name}.sbatch", *words],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=folder,
        env={"PATH": f"{folder}:{os.defpath}", **environment},
    )


def program(folder: Path, body: str) -> None:
    """A stand-in for the console script."""
    path = folder / "rollout"
    path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize("name", STAGES)
def test_address_and_password_file_reach_the_worker(name: str, tmp_path: Path) -> None:
    program(tmp_path, 'echo "$@ $ROLLOUT_REDIS__URL $ROLLOUT_REDIS__PASSWORD_FILE $PYTHONSAFEPATH"')
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "url").write_text("redis://10.0.0.1:7000/0\n", encoding="utf-8")
    done = run_script(name, tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), SLOTS="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("work", name, "--slots", "3"),
        *("redis://10.0.0.1:7000/0", f"{tmp_path}/line/password", "1"),
    ]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_url_of_ones_own_wins(name: str, tmp_path: Path) -> None:
    program(tmp_path, 'echo "$ROLLOUT_REDIS__URL ${ROLLOUT_REDIS__PASSWORD_FILE:-none}"')
    done = run_script(name, tmp_path, "MODEL", ROLLOUT_REDIS__URL="redis://mine/0")
    assert done.stdout.split() == ["redis://mine/0", "none"]


def test_what_follows_the_script_is_the_servers(tmp_path: Path) -> None:
    program(tmp_path, 'echo "$@"')
    about = {"ROLLOUT_REDIS__URL": "redis://mine/0"}
    done = run_script("serve", tmp_path, "/models/m", "--", "--tensor-parallel-size", "8", **about)
    assert done.stdout == "serve /models/m -- --tensor-parallel-size 8\n"
    assert "which model?" in run_script("serve", tmp_path, **about).stderr


def test_a_missing_server_or_program_is_a_sentence(tmp_path: Path) -> None:
    nothing = run_script("run", tmp_path)
    assert nothing.returncode == 1
    assert "no 'rollout' on PATH" in nothing.stderr
    program(tmp_path, "exit 0")
    no_server = run_script("run", tmp_path)
    assert no_server.returncode == 1
    assert "submit redis.sbatch first" in no_server.stderr


def test_the_program_is_the_process_that_slurm_signals(tmp_path: Path) -> None:
    program(tmp_path, 'trap "echo told; exit 0" TERM\necho $$\nread -r never')
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "url").write_text("redis://10.0.0.1:7000/0\n", encoding="utf-8")
    process = subprocess.Popen(
        ["bash", FOLDER / "run.sbatch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.defpath}"},
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid  # exec: no shell in between
    process.terminate()
    said, _ = process.communicate(timeout=10)
    assert said == "told\n"
    assert process.returncode == 0
