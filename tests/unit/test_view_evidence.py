"""What people see of a reward: why first, names, facts, tables, the log last; what is long is cut and counted."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pipeline.config import Config
from workers import view_reward, view_rollout
from workers.dossier import Dossier, artifacts, had_run
from workers.evidence import arranged
from workers.view_evidence_html import reward
from workers.view_html import page

EVIDENCE: dict[str, Any] = {
    "log": "one\n  two <b>\n",
    "exit_code": 1,
    "seconds": 3.25,
    "commands": ["pytest -q"],
    "failing": ["t.py::a", "t.py::b[<i>]"],
    "failing_count": 27,
    "not_run": [],
    "not_run_count": 0,
    "sent": [{"form": "order", "n": 1}, {"form": "order", "n": None}],
    "first": {"input": "1 2", "expected": "3"},
    "odd": {"a": [1, {"b": 2}]},
    "why": "2 tests fail",
}


def test_the_order_is_why_names_facts_tables_and_logs() -> None:
    assert [(item.name, item.kind) for item in arranged(EVIDENCE)] == [
        ("why", "why"), ("failing", "list"), ("commands", "list"), ("not_run", "fact"), ("exit_code", "fact"),
        ("seconds", "fact"), ("sent", "table"), ("first", "table"), ("odd", "json"), ("log", "block"),
    ]  # fmt: skip


def test_as_text() -> None:
    lines = view_reward.text({"resolved": 0.0, "pass_to_pass": 0.96774}, EVIDENCE).plain.splitlines()
    assert lines == [
        "  why        2 tests fail",
        "  parts      resolved           0",
        "             pass_to_pass  0.9677",
        "  failing (27, 2 are shown)", "    t.py::a", "    t.py::b[<i>]",
        "  commands", "    pytest -q",
        "  not_run    none", "  exit_code  1", "  seconds    3.25",
        "  sent", "    form   n", "    order  1", "    order  none",
        "  first", "    input     1 2", "    expected  3",
        "  odd", "    | {", '    |   "a": [', "    |     1,", "    |     {", '    |       "b": 2', "    |     }",
        "    |   ]", "    | }",
        "  log", "    | one", "    |   two <b>",
    ]  # fmt: skip
    assert view_reward.text({}, {}).plain == ""


def test_what_is_long_is_cut_and_counted() -> None:
    long = {"log": "a" * 9000 + "END", "diff": "START" + "b" * 9000, "names": [str(at) for at in range(80)],
            "deep": [[at] for at in range(5000)]}  # fmt: skip
    items = {item.name: item for item in arranged(long)}
    assert items["log"].value.endswith("END") and items["log"].note == "9003 characters, the last 6000 are shown"
    assert items["diff"].value.startswith("START") and items["diff"].note == "9005 characters, the first 6000 are shown"
    assert len(items["names"].value) == 50 and items["names"].note == "80, 50 are shown"
    assert len(items["deep"].value) == 3000 and "the first 3000 are shown" in items["deep"].note


def test_nothing_that_a_policy_printed_steers_the_terminal() -> None:
    evil = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J\ttab\r\nnext\x00"
    lines = view_reward.text({}, {"log": evil, "why": "\x1b[2J", "failing": ["a\x1bb"], "deep": {"a": ["\x7f", [1]]}})
    assert not [char for char in lines.plain if (ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160]
    assert "    | red \ufffd]0;title\ufffd" in lines.plain and "    | next" in lines.plain


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_any_evidence_is_shown_in_text_and_as_html(evidence: dict[str, Any]) -> None:
    view_reward.text({"x": 1.0}, evidence)
    text = page(Dossier(about={"id": "a.0", "reward": 1.0, "evidence": evidence}, attempts=[]), None)
    assert text.count("<pre") == text.count("</pre>") and text.count("<table") == text.count("</table>")
    assert len(arranged(evidence)) + sum(name.endswith("_count") for name in evidence) >= len(evidence)


def png(path: Path) -> Path:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0\1\2\3")) + chunk(b"IEND", b""))
    return path


def test_the_page_has_why_parts_log_pictures_and_links_and_runs_nothing(tmp_path: Path) -> None:
    config = Config().changed({"artifacts.folder": str(tmp_path)})
    folder = tmp_path / "rollout" / "x_y.0"
    shot = png(folder / "shots" / "1.png")
    (folder / "test.log").write_text("whole")
    (folder / "big.png").write_bytes(b"\x89PNG" + b"\0" * 1_000_000)
    (folder / "link.png").symlink_to(shot)
    files = artifacts(config, "x/y.0")
    assert [path.name for path in files] == ["big.png", "1.png", "test.log"]
    evidence = {**EVIDENCE, "log_file": str(folder / "test.log"), "else": "/etc/passwd"}
    about = {"id": "x/y.0", "reward": 0.0, "parts": {"<p>": 0.5}, "evidence": evidence, "task": {"q": "<script>"}}
    text = page(Dossier(about=about, attempts=[], artifacts=files), None)
    assert text.index("2 tests fail") < text.index("&lt;p&gt;") < text.index("t.py::a") < text.index("exit_code")
    assert '<pre class="log">one\n  two &lt;b&gt;\n</pre>' in text
    assert f'<td><a href="{(folder / "test.log").as_uri()}">test.log</a></td>' in text
    assert text.count("<img src=") == 1 and 'href="file:///etc/passwd"' not in text
    assert f'<li><a href="{(folder / "big.png").as_uri()}">big.png</a></li>' in text
    assert "<script>" not in text and "<p>" + "," not in text


def test_no_artifacts_where_none_are_kept(tmp_path: Path) -> None:
    assert artifacts(Config(), "a.0") == []
    assert artifacts(Config().changed({"artifacts.folder": str(tmp_path)}), "a.0") == []


def test_an_evaluation_out_of_time_shows_what_had_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"why": "out of time", "ran": 12, "log": "t::one PASSED\nt::two"}
    log = f"10:00:00 info begins\nthe tests took longer\nwhat had run: {json.dumps(told)}\n"
    about = {"id": "a.0", "outcome": "failed", "kind": "limit", "why": "the tests took longer", "log": log}
    found = Dossier(about=about, attempts=[])
    assert found.evidence == {"ran": 12, "log": "t::one PASSED\nt::two"}
    view_rollout.show(found, None)
    said = capsys.readouterr().out
    assert "  ran        12\n  log\n    | t::one PASSED\n    | t::two\n" in said
    assert "the end of its log:\n10:00:00 info begins\nthe tests took longer\n" in said and "what had run" not in said
    text = page(found, None)
    assert "t::one PASSED\nt::two</pre>" in text and "10:00:00 info begins" in text and "what had run: {" not in text


def test_a_log_that_is_cut_stays_a_log() -> None:
    assert had_run('what had run: {"ran": 1') == had_run("what had run: [1]") == had_run("") == {}
    found = Dossier(about={"id": "a.0", "log": 'what had run: {"ran": 1'}, attempts=[])
    assert found.evidence == {} and found.log == 'what had run: {"ran": 1'


def test_hostile_values_are_shown_as_what_they_are() -> None:
    deep: dict[str, Any] = {}
    inner = deep
    for _ in range(3000):
        inner["a"] = inner = {}
    circle: list[Any] = []
    circle.append(circle)
    evidence = {"turned": "a\u202eb", "half": "\ud800", "deep": deep, "circle": circle}
    for text in (view_reward.text({}, evidence).plain, reward(None, {}, evidence, [])):
        assert "a\ufffdb" in text and "\u202e" not in text and text.encode()
        assert text.count("be shown: ") == 2
