"""From settings to what `up` writes down, and the file itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, load
from pipeline.config_slurm import KINDS
from pipeline.errors import ConfigError
from workers.slurm import state as states, wanted
from workers.slurm.calls import passed
from workers.slurm.state import Strike


def config(folder: Path, **changes: Any) -> Config:
    return Config().changed(
        {"slurm.folder": str(folder), **{key.replace("__", "."): it for key, it in changes.items()}}
    )


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    assert states.read(tmp_path) is None
    made = wanted.state_of(config(tmp_path), None, {"PATH": "/bin", "TOKEN": "x"}, [])
    strike = Strike(count=1, at=2.0, until=3.0, why="w")
    whole = made.sized({"run": 5})
    whole = replace(whole, struck={"run": strike})
    states.write(tmp_path, whole)
    assert states.read(tmp_path) == whole
    assert (tmp_path / "slurm.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["slurm.json"]


def test_settings_that_the_last_up_has_not_seen(tmp_path: Path) -> None:
    here = config(tmp_path)
    known = wanted.state_of(here, None, {"ROLLOUT_POLICY__MODEL": "m"}, [])
    assert wanted.changed_since(here, known) == ""
    assert wanted.changed_since(here, known.sized({"run": 7})) == ""  # a person's scale is no change of the settings
    assert "up` (run): `rollout slurm up`" in wanted.changed_since(config(tmp_path, slurm__run__cpus=9), known)
    assert "(init)" in wanted.changed_since(config(tmp_path, slurm__init__jobs=9), known)
    assert "(redis, init, run, eval" in wanted.changed_since(config(tmp_path, slurm__setup=["x"]), known)
    assert "(redis, init" in wanted.changed_since(config(tmp_path, slurm__program="/new/rollout"), known)
    assert "last `up`: `rollout" in wanted.changed_since(config(tmp_path, slurm__overlap=700.0), known)
    down = known.sized(dict.fromkeys(known.kinds, 0))
    assert wanted.changed_since(config(tmp_path, slurm__setup=["x"]), down) == ""  # the next `up` takes them anyway


def test_what_a_newer_version_writes_is_left_aside(tmp_path: Path) -> None:
    made = wanted.state_of(config(tmp_path), None, {}, [])
    states.write(tmp_path, made)
    told = json.loads((tmp_path / "slurm.json").read_text())
    (tmp_path / "slurm.json").write_text(json.dumps({**told, "tomorrow": 1}))
    assert states.read(tmp_path) == made


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"line": 1}', "{"])
def test_a_file_that_says_nothing_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "slurm.json").write_text(text)
    with pytest.raises(ConfigError, match=r"does not say which jobs are wanted .*remove it"):
        states.read(tmp_path)


def test_a_line_keeps_its_tag_and_a_copy_gets_another(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    first = wanted.state_of(config(one), None, {}, [])
    (tmp_path / "link").symlink_to(one)
    assert wanted.state_of(config(tmp_path / "link"), first, {}, []).tag == first.tag
    assert wanted.state_of(config(other), first, {}, []).tag != first.tag
    assert wanted.state_of(config(other), None, {}, []).tag == states.tag_of(other)


def test_up_takes_the_settings_anew_and_keeps_who_is_on_its_way_out(tmp_path: Path) -> None:
    first = wanted.state_of(config(tmp_path), None, {}, [])
    scaled = first.sized({"run": 9})
    gone = replace(scaled, draining={"1_1": 5.0})
    again = wanted.state_of(config(tmp_path, slurm__run__cpus=7), gone, {}, [])
    assert again.wanted("run") == 2
    assert "--cpus-per-task=7" in again.kinds["run"].text
    assert again.draining == {"1_1": 5.0}
    assert again.changes > scaled.changes > first.changes
    assert wanted.resized(scaled, again) == ["run: 9 -> 2, as the settings say"]
    assert wanted.resized(None, first) == wanted.resized(first.sized(dict.fromkeys(KINDS, 0)), again) == []


def test_who_asks_for_what_is_wanted_already_changes_nothing(tmp_path: Path) -> None:
    """Two people, or two shells, say `up` at once: both wait for the same jobs."""
    first = wanted.state_of(config(tmp_path), None, {}, [])
    again = wanted.state_of(config(tmp_path), replace(first, seen=["1_1"]), {}, [])
    assert again.changes == first.changes and again.seen == ["1_1"]


def test_two_lines_do_not_share_a_folder(tmp_path: Path) -> None:
    first = wanted.state_of(config(tmp_path), None, {}, [])
    with pytest.raises(ConfigError, match=r"belongs to the line 'rollout'.* is 'mine': give each line a folder"):
        wanted.state_of(config(tmp_path, line__name="mine"), first, {}, [])
    wanted.state_of(config(tmp_path, line__name="mine"), first.sized(dict.fromkeys(KINDS, 0)), {}, [])


def test_settings_of_the_command_reach_the_jobs(tmp_path: Path) -> None:
    environ = {"ROLLOUT_CONFIG": "c.yaml", "ROLLOUT_LEASE__SECONDS": "40", "ROLLOUT_SLURM__FOLDER": "/f", "HOME": "/h"}
    found = wanted.variables(environ, ["workers.run.slots=8", "lease.seconds=50"])
    assert found == {"ROLLOUT_LEASE__SECONDS": "50", "ROLLOUT_WORKERS__RUN__SLOTS": "8"}
    made = load(None, [], found)
    assert (made.workers.run.slots, made.lease.seconds) == (8, 50.0)


def test_a_password_does_not(tmp_path: Path) -> None:
    for environ, overrides in [
        ({"ROLLOUT_REDIS__URL": "redis://:secret@h/0"}, []),
        ({}, ["redis.url=redis://u:secret@h"]),
    ]:
        with pytest.raises(ConfigError, match=r"ROLLOUT_REDIS__URL holds a password.*redis.password_file") as told:
            wanted.variables(environ, overrides)
        assert "secret" not in str(told.value)
    with pytest.raises(ConfigError, match=r"put it into the settings' file"):
        wanted.variables({}, ["line.lanes.My-Lane=3"])


def test_the_jobs_get_no_token_of_the_shell(tmp_path: Path) -> None:
    environ = {"PATH": "/bin", "HOME": "/h", "HF_TOKEN": "secret-1", "SLURM_JOB_ID": "1", "TMPDIR": "/t", "LANG": "C"}
    assert passed(environ) == {"PATH": "/bin", "HOME": "/h", "LANG": "C"}
    made = wanted.state_of(config(tmp_path), None, environ, [])
    states.write(tmp_path, made)
    assert "secret" not in (tmp_path / "slurm.json").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slurm__folder": ""}, "slurm.folder is empty"),
        ({"slurm__vllm__jobs": 1}, "slurm.vllm.model is empty: name the model"),
        ({"redis__url": "redis://h/0"}, "redis.url is set, and slurm.redis.jobs is 1"),
        ({"slurm__redis__jobs": 0}, "slurm.redis.jobs is 0 and redis.url is empty"),
        ({"slurm__options": ["--export=ALL"]}, "the line sets this itself"),
        ({"slurm__run__options": ["--array=1-3"]}, "the line sets this itself"),
        ({"slurm__run__options": ["-J", ]}, "the line sets this itself"),
        ({"slurm__folder": 'a"b'}, "holds a quote"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    wanted.check(config(tmp_path, slurm__options=["--qos=x", "--export-file=x"]))
    with pytest.raises(ConfigError, match=said):
        wanted.check(config(tmp_path, **changes))


def test_the_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    wanted.make_folder(tmp_path / "a" / "line")
    assert (tmp_path / "a" / "line").stat().st_mode & 0o077 == 0
    assert (tmp_path / "a" / "line" / "logs").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"slurm.folder .* can't be used: Not a directory"):
        wanted.make_folder(tmp_path / "file" / "line")
