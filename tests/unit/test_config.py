"""Settings: read strictly, in the stated order, with sentences for every mistake."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st
from pydantic import ValidationError

from pipeline.config import Config, load
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fails(match: str, **sources: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        load(**{"environ": {}, **sources})


def test_config_yaml_shows_every_setting_with_its_default() -> None:
    shown = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    assert shown == Config().model_dump()
    assert list(shown) == list(Config().model_dump()), "same order as the models"


def test_every_line_of_config_yaml_says_unit_and_reason() -> None:
    lines = (ROOT / "config.yaml").read_text(encoding="utf-8").splitlines()
    settings = [line for line in lines if line.startswith("  ") and not line.endswith(":")]
    assert len(settings) > 40
    assert [line for line in settings if "  # " not in line] == []


def test_the_page_of_settings_is_current() -> None:
    page = runpy.run_path(str(ROOT / ".ci" / "config_page.py"))["page"]
    text = page((ROOT / "config.yaml").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == text, "say `make docs`"


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(environ={})
    assert config == Config()
    assert config.source is None
    assert config.folder == tmp_path


def test_a_file_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "lease: {seconds: 60}\nredis:\n  # all of it is commented out\n")
    monkeypatch.chdir(tmp_path)
    config = load(environ={})
    assert config.lease.seconds == 60.0
    assert config.lease.beat == 10.0
    assert config.source == tmp_path / "config.yaml"
    assert config.path_of("line") == tmp_path / "line"
    assert config.path_of("/a/b") == Path("/a/b")


def test_order_file_variables_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "retry: {attempts: 4, losses: 5, backoff: 2}")
    environ = {"ROLLOUT_RETRY__LOSSES": "6", "ROLLOUT_RETRY__BACKOFF": "3", "HOME": "/"}
    config = load(path, ["retry.backoff=4"], environ)
    assert (config.retry.attempts, config.retry.losses, config.retry.backoff) == (4, 6, 4.0)


def test_the_given_path_wins_over_the_variable(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = write(tmp_path, "line: {name: first}"), write(tmp_path / "b", "line: {name: second}")
    assert load(first, environ={"ROLLOUT_CONFIG": str(second)}).line.name == "first"
    assert load(environ={"ROLLOUT_CONFIG": str(second)}).line.name == "second"


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing yet\n"), environ={}).model_dump() == Config().model_dump()


def test_lanes_of_a_file_replace_the_defaults_and_an_override_adds(tmp_path: Path) -> None:
    path = write(tmp_path, "line: {lanes: {only: 1}}")
    assert load(path, environ={}).line.lanes == {"only": 1}
    assert load(path, ["line.lanes.more=2"], {}).line.lanes == {"only": 1, "more": 2}
    assert load(path, environ={"ROLLOUT_LINE__LANES": "{a: 3}"}).line.lanes == {"a": 3}


@pytest.mark.parametrize("word", ["no", "1.0", "null", "a: b", "redis://:p@h:1/0", "'quoted'"])
def test_text_stays_text(word: str) -> None:
    assert load(overrides=[f"policy.model={word}"], environ={}).policy.model == word.strip("'")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("workers: {run: {concurency: 3}}", r"^config\.yaml: workers\.run\.concurency: unknown key \(valid: slots\)$"),
        (
            "reddis: {}",
            r"^config\.yaml: reddis: unknown key \(did you mean redis\? valid: artifacts, .*workers\)$",
        ),
        ("lease: {seconds: soon}", r"^config\.yaml: lease\.seconds: 'soon' is wrong, wanted a number$"),
        ("lease: {seconds: '30'}", r"lease\.seconds: '30' is wrong, wanted a number"),
        ("lease: {seconds: true}", r"lease\.seconds: True is wrong, wanted a number"),
        ("lease: {seconds: .inf}", r"lease\.seconds: inf is wrong, wanted a finite number"),
        ("lease: {seconds: 0}", r"lease\.seconds: 0 is wrong, wanted greater than 0"),
        ("lease: {seconds: }", r"lease\.seconds: nothing is wrong, wanted a number"),
        ("retry: {attempts: 2.5}", r"retry\.attempts: 2\.5 is wrong, wanted a whole number"),
        ("policy: {model: 3}", r"policy\.model: 3 is wrong, wanted text"),
        ("redis: 5", r"redis: 5 is wrong, wanted a section with address_file, connect_timeout, data"),
        ("line: {lanes: [a]}", r"line\.lanes: \['a'\] is wrong, wanted a mapping"),
        ("line: {lanes: {}}", r"line\.lanes: \{\} is wrong, wanted at least one entry"),
        ("line: {lanes: {a: 0}}", r"line\.lanes\.a: 0 is wrong, wanted greater than or equal to 1"),
        ("line: {name: a b}", r"line\.name: 'a b' is wrong, wanted text that matches"),
        ("sandbox: {driver: docker}", r"\.driver: 'docker' is wrong, wanted one of local, bubblewrap, apptainer$"),
        ("lease: {beat: 20}", r"lease\.beat: 20\.0 s is more than half of lease\.seconds"),
        ("lease: {seconds: 3, beat: 1, tick: 2}", r"lease\.tick: 2\.0 s is more than half"),
        ("limits: {loop_dead: 20}", r"limits\.loop_dead: 20\.0 s must be longer than limits\.loop_stall"),
        ("retry: {backoff_max: 0}", r"retry\.backoff_max: 0\.0 s is less than"),
        ("policy: {context: 10}", r"policy\.max_tokens: 1024 does not fit"),
        ("lease: {beat: 1, beat: 2}", r"^config\.yaml: is not valid YAML: key 'beat' is given twice.*line 1"),
        ("1: 2", r"key 1 is not text"),
        ("- a", r"^config\.yaml: wanted sections such as 'redis:', found \['a'\]"),
        ("a: [", r"^config\.yaml: is not valid YAML: .*line 1"),
        ("a: !!python/object:os.system {}", r"is not valid YAML"),
    ],
)
def test_a_wrong_file_is_a_sentence(text: str, match: str, tmp_path: Path) -> None:
    fails(match, path=write(tmp_path, text))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "lease: {seconds: x}\nretry: {attemps: 1}")
    fails(r"lease\.seconds: 'x'.*; config\.yaml: retry\.attemps: unknown key", path=path)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    fails("none.yaml: no such file", path=tmp_path / "none.yaml")
    fails("ROLLOUT_CONFIG=/none.yaml: no such file", environ={"ROLLOUT_CONFIG": "/none.yaml"})


def test_bytes_that_are_no_text_are_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    fails("is not valid YAML", path=path)


def test_a_wrong_variable_is_a_sentence() -> None:
    fails(
        r"^ROLLOUT_REDIS_URL: unknown variable \(did you mean ROLLOUT_REDIS__URL\? valid: ROLLOUT_CONFIG, ",
        environ={"ROLLOUT_REDIS_URL": "x"},
    )
    fails(
        r"^ROLLOUT_RETRY__LOSSES: retry\.losses: 'maybe' is wrong, wanted a whole number",
        environ={"ROLLOUT_RETRY__LOSSES": "maybe"},
    )


def test_a_wrong_override_is_a_sentence() -> None:
    fails(r"^--set lease: wanted section\.key=value$", overrides=["lease"])
    fails(r"^--set =1: wanted", overrides=["=1"])
    fails(r"^--set a\.b=1: a: unknown key \(valid: artifacts", overrides=["a.b=1"])
    fails(
        r"^--set lease\.beet=1: lease\.beet: unknown key \(did you mean beat\? valid: beat, ",
        overrides=["lease.beet=1"],
    )


def test_changed_makes_a_checked_copy() -> None:
    config = Config()
    assert config.changed({"lease.seconds": 40.0}).lease.seconds == 40.0
    assert config.lease.seconds == 30.0
    with pytest.raises(ConfigError, match=r"lease\.beat: 20\.0 s is more than half"):
        config.changed({"lease.beat": 20.0})
    with pytest.raises(ConfigError, match=r"^lease\.beet: lease\.beet: unknown key"):
        config.changed({"lease.beet": 1})


def test_changed_keeps_the_source(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert load(path, environ={}).changed({"retry.losses": 2}).source == path


def test_settings_can_not_be_changed_in_place() -> None:
    with pytest.raises(ValidationError):
        Config().lease.seconds = 1.0  # type: ignore[misc]


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.integers(), st.text(max_size=8)), max_size=4))
def test_any_mapping_is_read_or_refused_with_a_sentence(data: dict[str, Any]) -> None:
    try:
        Config().changed({f"lease.{key}": value for key, value in data.items()})
    except ConfigError as error:
        assert "lease" in str(error)
