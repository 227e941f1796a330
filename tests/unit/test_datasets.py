"""Datasets as tasks: real small files in, plain tasks out, and every wrong row told with its file, row and column."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given, strategies as st
from pyarrow import parquet

from pipeline import wire
from pipeline.columns import at, filled, plain
from pipeline.config import Config, DatasetConfig
from pipeline.datasets import Spool, read_tasks, tasks_of_rows
from pipeline.envelope import Task
from pipeline.errors import ConfigError, TaskError
from pipeline.task_lines import line_of, parse

SWE_ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "patch": "diff --git a/x b/x\n",
    "test_patch": "diff --git a/t b/t\n",
    "problem_statement": "It breaks.",
    "hints_text": None,
    "FAIL_TO_PASS": '["t::one"]',
    "PASS_TO_PASS": ["t::two"],
    "install_config": {"test_cmd": "pytest", "docker": {"node": None, "python": "3.10"}},
    "created_at": datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC),
}


def verl_row(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {index} + 1?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index, "split": "train"},
        **changes,
    }


def write(folder: Path, rows: list[dict[str, Any]], name: str = "t.parquet", **about: Any) -> Path:
    path = folder / name
    parquet.write_table(arrow.Table.from_pylist(rows), path, **about)
    return path


def lines(folder: Path, rows: list[Any], name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


# -- known columns ---------------------------------------------------------------------------------------------------


def test_swe_benchs_rows_are_tasks_as_they_are(tmp_path: Path) -> None:
    (task,) = read_tasks(write(tmp_path, [SWE_ROW]))
    assert (task.handler, task.id) == ("swe", "a__b-1")
    wanted = {**SWE_ROW, "created_at": "2024-05-01T12:00:00+00:00"}
    del wanted["hints_text"]
    wanted["install_config"] = {"test_cmd": "pytest", "docker": {"python": "3.10"}}
    assert task.data == wanted


def test_verls_rows_become_math(tmp_path: Path) -> None:
    tasks = list(read_tasks(write(tmp_path, [verl_row(3), verl_row(4)])))
    assert tasks == [
        Task(
            handler="math",
            id=f"openai/gsm8k-train-{at}",
            data={"question": f"What is {at} + 1?", "expected_answer": str(at + 1)},
        )
        for at in (3, 4)
    ]
    assert [task.id for task in read_tasks(lines(tmp_path, [verl_row(3)]))] == ["openai/gsm8k-train-3"]


@pytest.mark.parametrize(
    ("changes", "handler", "id"),
    [
        ({"ability": "MATH", "data_source": "x"}, "math", "x-train-1"),
        ({"ability": None, "data_source": "aime2024"}, "math", "aime2024-train-1"),
        ({"ability": "coding", "data_source": "taco"}, "code", "taco-train-1"),
        ({"ability": "", "data_source": "codecontests"}, "code", "codecontests-train-1"),
        ({"extra_info": {"index": "f00"}}, "math", "openai/gsm8k-f00"),
        ({"extra_info": None}, "math", "openai/gsm8k-row0"),
        ({"prompt": "What is 2?"}, "math", "openai/gsm8k-train-1"),
        ({"reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": 2}}, "math", "openai/gsm8k-train-1"),
    ],
)
def test_the_family_of_verls_rows(changes: dict[str, Any], handler: str, id: str) -> None:
    (task,) = tasks_of_rows([verl_row(1, **changes)])
    assert (task.handler, task.id) == (handler, id)
    assert task.data["expected_answer" if handler == "math" else "input_output"] == "2"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ability": "poetry"}, "row 0: it has verl's columns, but.*'poetry'.*--handler NAME.*--dataset"),
        ({"ability": None, "data_source": "mine"}, "ability '' and data_source 'mine'"),
        ({"reward_model": {"style": "model", "ground_truth": "x"}}, "reward_model.style is 'model'"),
        ({"images": [{"bytes": b"x"}]}, "it has images, which the built-in families do not show"),
        ({"reward_model": {"style": "rule"}}, "'reward_model' has no 'ground_truth' .it has: style"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "no entry of the list 'prompt' has the role 'user'"),
    ],
)
def test_verls_rows_that_are_not_clear_are_asked_about(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        list(tasks_of_rows([verl_row(1, **changes)], name="t.parquet"))


def test_a_handler_of_ones_own_takes_verls_rows_with_all_their_columns() -> None:
    (task,) = tasks_of_rows([verl_row(1, ability="poetry")], handler="mine:Poems")
    assert task.data["question"] == "What is 1 + 1?" and task.data["reward_model"]["ground_truth"] == "2"
    (task,) = tasks_of_rows([verl_row(1, ability="poetry")], handler="handlers.math:Math")
    assert task.data == {"question": "What is 1 + 1?", "expected_answer": "2"}


def test_unknown_columns_ask_for_a_mapping(tmp_path: Path) -> None:
    file = write(tmp_path, [{"q": "x", "a": 1}])
    with pytest.raises(TaskError, match=r"t\.parquet, row 0: it names no handler, and its columns .* \(a, q\): say"):
        list(read_tasks(file))
    assert list(read_tasks(file, handler="mine:Mine")) == [Task(handler="mine:Mine", data={"q": "x", "a": 1})]
    short = {name: value for name, value in SWE_ROW.items() if name != "test_patch"}
    with pytest.raises(TaskError, match="of SWE-bench's columns it lacks test_patch"):
        list(tasks_of_rows([short]))


def test_whole_tasks_in_parquet(tmp_path: Path) -> None:
    rows = [{"handler": "echo", "id": "a", "data": {"text": "x"}, "limits": {"run": 3}}, {"id": None, "data": {}}]
    tasks = list(read_tasks(write(tmp_path, rows), handler="math"))
    assert tasks[0] == Task(handler="echo", id="a", data={"text": "x"}, limits={"run": 3})


# -- mappings --------------------------------------------------------------------------------------------------------


MINE = DatasetConfig(
    handler="math",
    id="{source}-{meta.number}",
    fields={"question": "turns.-1.content", "expected_answer": "{meta.answer}"},
    constants={"kind": "sum"},
    sampling={"temperature": 0.5},
    limits={"run": 60},
)


def mine(number: int = 1, **meta: Any) -> dict[str, Any]:
    return {"source": "mine", "turns": [{"content": "1+1?"}], "meta": {"number": number, "answer": 2, **meta}, "x": [1]}


def test_a_mapping_of_ones_own(tmp_path: Path) -> None:
    config = Config().changed({"datasets": {"mine": MINE.model_dump()}})
    wanted = Task(
        handler="math", id="mine-1", data={"question": "1+1?", "expected_answer": "2", "kind": "sum"},
        sampling={"temperature": 0.5}, limits={"run": 60},
    )  # fmt: skip
    assert list(read_tasks(write(tmp_path, [mine()]), dataset="mine", config=config)) == [wanted]
    assert list(read_tasks(lines(tmp_path, [mine()]), dataset=MINE)) == [wanted]
    with pytest.raises(ConfigError, match="no dataset 'mien' in section `datasets` .there: mine"):
        list(read_tasks("x", dataset="mien", config=config))


def test_keep_and_no_fields_take_the_columns_as_they_are() -> None:
    (task,) = tasks_of_rows([mine()], dataset=MINE.model_copy(update={"keep": True}))
    assert task.data["x"] == [1] and task.data["question"] == "1+1?" and task.data["meta"]["answer"] == 2
    (task,) = tasks_of_rows([{"a": 1, "b": None}], dataset=DatasetConfig(handler="h:H", constants={"c": 2}))
    assert task == Task(handler="h:H", data={"a": 1, "c": 2})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**mine(), "source": None}, "row 0: its id, column .{source}-{meta.number}., is None"),
        ({**mine(), "turns": []}, "'turns.-1.content': 'turns' has 0 entries, so there is no -1"),
        ({**mine(), "turns": "x"}, "'turns.-1.content' steps into 'turns', which is the text 'x'"),
        ({**mine(), "turns": 3}, "steps into 'turns', which is 3"),
        ({"source": "x", "turns": [{"content": "?"}]}, "there is no column 'meta' .columns: source, turns"),
        (mine(answer=float("inf")), "column 'meta.answer' is inf"),
        (mine(answer=2**80), "column 'meta.answer' is 1208925819614629174706176: a whole number of more than 64 bits"),
        (mine(answer=b"\xff"), "column 'meta.answer' is 1 bytes"),
        (mine(answer=object()), "column 'meta.answer' is a object"),
    ],
)
def test_a_wrong_row_names_the_column_and_the_value(row: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        list(tasks_of_rows([row], dataset=MINE, name="t"))


def test_what_a_handler_does_not_take_is_told_with_the_column_it_came_from() -> None:
    from workers.jsonl import Checker

    wrong = MINE.model_copy(update={"fields": {**MINE.fields, "question": "meta.number"}})
    with pytest.raises(TaskError) as caught:
        list(tasks_of_rows([mine(7)], dataset=wrong, check=Checker(None).check, name="t"))
    assert str(caught.value).startswith("t, row 0: Math: field 'question' is 7: ")
    assert str(caught.value).endswith("('question' comes from column 'meta.number')")


def test_paths_go_first_by_the_whole_name_and_into_json_text() -> None:
    assert at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert at({"tests": '{"inputs": ["1"]}'}, "tests.inputs.0") == "1"
    assert at({"m": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "m.user.content") == "b"
    assert filled({"a": {"b": [1, None]}}, "<{a.b}>") == "<[1, null]>"
    assert filled({"a": None}, "{a}") is None


# -- values ----------------------------------------------------------------------------------------------------------


def test_values_of_arrow_become_plain(tmp_path: Path) -> None:
    table = arrow.table(
        {
            "id": ["x"],
            "ns": arrow.array([1_700_000_000_123_456_789], arrow.timestamp("ns", "UTC")),
            "day": arrow.array([datetime.date(2024, 2, 29)]),
            "span": arrow.array([1_500_000_000], arrow.duration("ns")),
            "price": arrow.array([decimal.Decimal("1.50")]),
            "blob": arrow.array([b"\x00\xff"]),
            "nan": arrow.array([float("nan")]),
            "none": arrow.nulls(1),
            "map": arrow.array([[("k", 1)]], arrow.map_(arrow.string(), arrow.int64())),
            "word": arrow.array(["a"]).dictionary_encode(),
            "deep": [[{"a": [1, None]}, {"b": "x"}]],
            "flag": [True],
            "unsigned": arrow.array([2**64 - 1], arrow.uint64()),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    (task,) = read_tasks(tmp_path / "t.parquet", handler="h:H")
    assert task.id == "x"
    assert task.data == {
        "ns": "2023-11-14T22:13:20.123456+00:00", "day": "2024-02-29", "span": 1.5, "price": "1.50",
        "blob": b"\x00\xff", "map": {"k": 1}, "word": "a", "deep": [{"a": [1, None]}, {"b": "x"}],
        "flag": True, "unsigned": 2**64 - 1,
    }  # fmt: skip
    assert wire.unpack(wire.pack(task.data)) == task.data


def test_values_of_numpy_become_plain() -> None:
    row = {
        "array": np.array([1, 2]), "matrix": np.array([[0.5, np.nan]], np.float32), "number": np.int32(3),
        "objects": np.array([{"a": np.float64(1.5)}], dtype=object), "flag": np.bool_(True),
        "time": np.datetime64("2024-01-01T00:00:00"), "never": np.datetime64("NaT"), "span": np.timedelta64(90, "s"),
    }  # fmt: skip
    (task,) = tasks_of_rows([row], handler="h:H")
    assert task.data == {
        "array": [1, 2], "matrix": [[0.5, None]], "number": 3, "objects": [{"a": 1.5}], "flag": True,
        "time": "2024-01-01T00:00:00", "span": 90.0,
    }  # fmt: skip
    assert {type(value) for value in task.data["array"]} == {int} and type(task.data["flag"]) is bool


def test_numpys_text_travels_and_what_holds_itself_is_told() -> None:
    (task,) = tasks_of_rows([{"text": np.str_("a")}], handler="h:H")
    assert type(task.data["text"]) is str
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(TaskError, match="row 0: it holds itself"):
        list(tasks_of_rows([{"circle": circle}], handler="h:H"))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: dense(item) for key, item in value.items() if item is not None}
    return [dense(item) for item in value] if isinstance(value, list) else value


@given(PLAIN)
def test_plain_values_stay_what_they_are_but_for_empty_entries(value: Any) -> None:
    made = plain(value, "x")
    assert made == dense(value)
    assert wire.unpack(wire.pack(made)) == made


def test_a_null_in_json_lines_was_meant(tmp_path: Path) -> None:
    (task,) = read_tasks(lines(tmp_path, [{"a": {"b": None}}]), handler="h:H")
    assert task.data == {"a": {"b": None}}


# -- files -----------------------------------------------------------------------------------------------------------


def numbered(folder: Path, count: int = 500, **about: Any) -> Path:
    return write(folder, [verl_row(number) for number in range(count)], **{"row_group_size": 70, **about})


def numbers(tasks: Any) -> list[int]:
    return [int(task.id.rpartition("-")[2]) for task in tasks]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_limit_and_shuffle(kind: str, tmp_path: Path) -> None:
    file = numbered(tmp_path) if kind == "parquet" else lines(tmp_path, [verl_row(number) for number in range(500)])
    assert numbers(read_tasks(file)) == list(range(500))
    assert numbers(read_tasks(file, rows=(69, 142))) == list(range(69, 142))
    assert numbers(read_tasks(file, rows=(141, None), limit=2)) == [141, 142]
    assert numbers(read_tasks(file, limit=3)) == [0, 1, 2]
    drawn = numbers(read_tasks(file, shuffle=7))
    assert sorted(drawn) == list(range(500)) and drawn != list(range(500))
    assert numbers(read_tasks(file, shuffle=7, limit=5)) == drawn[:5] != numbers(read_tasks(file, shuffle=8, limit=5))
    assert sorted(numbers(read_tasks(file, shuffle=7, rows=(10, 20)))) == list(range(10, 20))
    with pytest.raises(TaskError, match="holds no task"):
        list(read_tasks(file, rows=(500, None)))


def test_rows_are_read_only_as_far_as_they_are_wanted(tmp_path: Path) -> None:
    rows = [verl_row(number) for number in range(9)] + [verl_row(9, ability="poetry")]
    file = write(tmp_path, rows)
    assert len(list(read_tasks(file, limit=9))) == 9
    with pytest.raises(TaskError, match=r"t\.parquet, row 9: .*poetry"):
        list(read_tasks(file))


def test_an_id_that_stands_twice(tmp_path: Path) -> None:
    file = write(tmp_path, [verl_row(1), verl_row(2), verl_row(1)])
    with pytest.raises(TaskError, match=r"row 2: id 'openai/gsm8k-train-1' stands in row 0 too.*--once"):
        list(read_tasks(file))
    assert numbers(read_tasks(file, once=True)) == [1, 2]


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"PAR1 and nothing more", "can't be read as Parquet"), (None, "No such file"), ("folder", "is a folder")],
)
def test_files_that_can_not_be_read(data: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    if isinstance(data, bytes):
        file.write_bytes(data)
    elif data:
        file.mkdir()
    with pytest.raises(TaskError, match=says):
        list(read_tasks(file))


def test_a_file_that_breaks_off_names_the_row(tmp_path: Path) -> None:
    file = numbered(tmp_path, compression="none")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 600] = b"\xff" * 600
    file.write_bytes(data)
    with pytest.raises(TaskError, match=r"t\.parquet(, row \d+: | can't be read as Parquet)"):
        list(read_tasks(file))


def test_without_pyarrow_the_mend_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = numbered(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match="needs pyarrow, which is not installed: pip install"):
        list(read_tasks(file))


def test_a_spool_gives_back_what_was_put_in_in_any_order() -> None:
    tasks = [Task(handler="echo", id=str(number), data={"blob": b"\x00" * number}) for number in range(50)]
    with Spool() as spool:
        for task in tasks:
            spool.add(task)
        assert list(spool.tasks()) == tasks and len(spool) == 50
        assert list(spool.tasks([49, 0, 7])) == [tasks[49], tasks[0], tasks[7]]


def test_a_task_is_written_as_a_line_that_reads_the_same() -> None:
    task = Task(
        handler="math", id="ä", data={"question": "x", "n": None}, limits={"run": 3}, policy="other",
        validated={"line": "rollout", "seconds": 1.5},
    )  # fmt: skip
    assert parse(line_of(task), None) == task
    assert json.loads(line_of(Task(handler="echo"))) == {"handler": "echo", "data": {}}
    with pytest.raises(TaskError, match="can't be written as a line of JSON"):
        line_of(Task(handler="echo", data={"x": b"\x00"}))
