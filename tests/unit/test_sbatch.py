"""The batch scripts: what is committed is what the code prints; they parse, and hand Slurm's signal to the program."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config_slurm import KINDS
from workers.slurm.text import STAGES, VARIABLES, Place, pages, text

FOLDER = Path(__file__).parents[2] / "sbatch"
PLACE = Place(
    tag="0a1b2c3d",
    folder="/shared/my line",
    config="/shared/it's/config.yaml",
    home="/shared/it's",
    program="/shared/venv $HOME/bin/rollout",
    variables={"ROLLOUT_LEASE__SECONDS": "40", "ROLLOUT_POLICY__MODEL": "it's $HOME"},
)


def directives(script: str) -> dict[str, str]:
    """#SBATCH --key=value lines."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))


def test_the_files_are_what_the_code_prints() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert committed == pages(), "say `make docs`"
    assert sorted(committed) == sorted(f"{kind}.sbatch" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [Place(), PLACE], ids=["by hand", "by up"])
def test_bash_can_parse_it_and_it_becomes_its_program(kind: str, place: Place) -> None:
    config = Config().changed({"slurm.setup": ["module load apptainer"]})
    script = text(config, kind, place)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "set -euo pipefail" in lines
    assert lines.index("set +u") + 1 == lines.index("module load apptainer") == lines.index("set -u") - 1
    assert lines[-1].startswith('exec "$LINE_PROGRAM" ')


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_that_is_read_is_declared_once(kind: str) -> None:
    script = "\n".join(line for line in pages()[f"{kind}.sbatch"].splitlines() if not line.startswith("#"))
    read = set(re.findall(r"\$\{?([A-Za-z_]+)", script)) - {"SLURM_SUBMIT_DIR", "PWD", "ROLLOUT_CONFIG"}
    declared = re.findall(r"^(\w+)=", script, re.MULTILINE)
    assert read <= set(declared) <= set(VARIABLES)
    assert len(declared) == len(set(declared))


@pytest.mark.parametrize("kind", KINDS)
def test_directives_of_the_defaults(kind: str) -> None:
    found = directives(pages()[f"{kind}.sbatch"])
    assert found["signal"] == "B:TERM@120"
    assert found["open-mode"] == "append"
    assert "requeue" in found
    assert ("array" in found) == (kind != "redis")
    assert not {"partition", "account", "chdir", "nodelist"} & set(found), "these belong to one site"


def test_directives_of_a_site() -> None:
    config = Config().changed({
        "line.name": "swe", "slurm.partition": "cpu", "slurm.account": "lab", "slurm.options": ["--qos=long"],
        "slurm.run.jobs": 3, "slurm.run.partition": "big", "slurm.run.options": ["--constraint=a&b"],
        "slurm.run.gpus": 2, "slurm.run.time": "1-00:00:00",
    })  # fmt: skip
    script = text(config, "run", PLACE)
    assert directives(script) == {
        "job-name": "swe-run-0a1b2c3d", "array": "1-3", "ntasks": "1", "cpus-per-task": "2", "mem": "8192M",
        "gres": "gpu:2", "time": "1-00:00:00", "partition": "big", "account": "lab", "signal": "B:TERM@120",
        "requeue": "", "open-mode": "append", "output": '"/shared/my line/logs/%x-%A_%a.out"', "qos": "long",
        "constraint": "a&b",
    }  # fmt: skip
    assert directives(text(config, "init", PLACE))["partition"] == "cpu"
    assert directives(text(config, "redis", PLACE))["output"] == '"/shared/my line/logs/%x-%j.out"'
    assert "%%" in directives(text(config, "run", Place(folder="/s/50%")))["output"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_name_no_machine(kind: str) -> None:
    paths = re.findall(r"(?<![\w$}\"'])/[a-z][\w./-]*", pages()[f"{kind}.sbatch"])
    assert set(paths) <= {"/bin/bash", "/dev/null"}


def run_script(script: str, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script under bash, with only the given environment and a PATH that begins with `folder`."""
    return subprocess.run(
        ["bash", "-s", "--", *words], input=script, capture_output=True, text=True, timeout=20, cwd=folder,
        env={"PATH": f"{folder}:{os.defpath}", **environment}, check=False,
    )  # fmt: skip


def program(path: Path, body: str) -> Path:
    """A stand-in for the console script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("kind", STAGES)
def test_by_hand_the_environment_says_which_line(kind: str, tmp_path: Path) -> None:
    program(tmp_path / "rollout", 'echo "$@ $ROLLOUT_SLURM__FOLDER $ROLLOUT_CONFIG $PYTHONSAFEPATH $PWD"')
    (tmp_path / "sub").mkdir()
    about = {"LINE_FOLDER": "/s/line", "LINE_CONFIG": "/s/c.yaml", "LINE_SLOTS": "3", "SLURM_SUBMIT_DIR": "sub"}
    done = run_script(pages()[f"{kind}.sbatch"], tmp_path, **about)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["work", kind, "--slots", "3", "/s/line", "/s/c.yaml", "1", str(tmp_path / "sub")]


def test_by_hand_the_settings_are_left_alone_where_nothing_is_said(tmp_path: Path) -> None:
    program(tmp_path / "rollout", 'echo "$@ ${ROLLOUT_SLURM__FOLDER-none} ${ROLLOUT_CONFIG-none}"')
    assert run_script(pages()["run.sbatch"], tmp_path).stdout == "work run none none\n"
    mine = run_script(pages()["run.sbatch"], tmp_path, ROLLOUT_CONFIG="mine.yaml", ROLLOUT_SLURM__FOLDER="/f")
    assert mine.stdout == "work run /f mine.yaml\n"


def test_what_up_submits_knows_its_line_whatever_the_characters(tmp_path: Path) -> None:
    home = tmp_path / "it's $HOME"
    said = 'echo "$0|$@|$ROLLOUT_SLURM__FOLDER|$ROLLOUT_CONFIG|$ROLLOUT_POLICY__MODEL|$PWD"'
    path = program(home / "rollout", said)
    place = Place(
        tag="0a1b2c3d", folder=f"{home}/line", config=f"{home}/c.yaml", home=str(home), program=str(path),
        variables={"ROLLOUT_POLICY__MODEL": "it's $HOME\n`x`"},
    )  # fmt: skip
    done = run_script(text(Config(), "eval", place), tmp_path)
    assert done.stdout == f"{path}|work eval|{home}/line|{home}/c.yaml|it's $HOME\n`x`|{home}\n", done.stderr


def test_what_follows_the_script_is_the_servers(tmp_path: Path) -> None:
    program(tmp_path / "rollout", 'printf "<%s>" "$@"')
    script = pages()["vllm.sbatch"]
    done = run_script(script, tmp_path, "/models/m", "--", "--tensor-parallel-size", "8")
    assert done.stdout == "<serve></models/m><--><--tensor-parallel-size><8>"
    assert "which model?" in run_script(script, tmp_path).stderr


def test_the_settings_name_the_model_and_its_words(tmp_path: Path) -> None:
    program(tmp_path / "rollout", 'printf "<%s>" "$@"')
    config = Config().changed({"slurm.vllm.model": "my model", "slurm.vllm.arguments": ["--x", '{"a": 1}']})
    assert run_script(text(config, "vllm"), tmp_path).stdout == '<serve><my model><--><--x><{"a": 1}>'


def test_a_missing_program_is_a_sentence(tmp_path: Path) -> None:
    nothing = run_script(pages()["run.sbatch"], tmp_path)
    assert nothing.returncode == 1
    assert "no program rollout on this node" in nothing.stderr


def test_a_failing_line_of_setup_ends_the_job(tmp_path: Path) -> None:
    program(tmp_path / "rollout", "echo started")
    ready = Config().changed({"slurm.setup": ['echo "$NOT_SET" >/dev/null', "export MINE=1"]})
    assert run_script(text(ready, "run"), tmp_path).stdout == "started\n"
    broken = run_script(text(Config().changed({"slurm.setup": ["false"]}), "run"), tmp_path)
    assert (broken.returncode, broken.stdout) == (1, "")


def test_the_program_is_the_process_that_slurm_signals(tmp_path: Path) -> None:
    program(tmp_path / "rollout", 'trap "echo told; exit 0" TERM\necho $$\nread -r never')
    process = subprocess.Popen(
        ["bash", FOLDER / "run.sbatch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.defpath}"},
    )  # fmt: skip
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid  # exec: no shell in between
    process.terminate()
    said, _ = process.communicate(timeout=10)
    assert said == "told\n"
    assert process.returncode == 0
