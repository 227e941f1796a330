"""A programming task as the datasets have it, and its tests in one form."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipeline.errors import TaskError


class Language(NamedTuple):
    """How programs of a language are marked, called, compiled and run; `{folder}` is where the file lies."""

    marks: tuple[str, ...]
    file: str
    compile: str
    run: str


LANGUAGES = {
    "python": Language(("python", "py", "python3"), "main.py", "", "python3 {folder}/main.py"),
    "cpp": Language(
        ("cpp", "c++", "cc", "cxx"), "main.cpp", "g++ -O2 -std=c++17 -o {folder}/main {folder}/main.cpp",
        "{folder}/main",
    ),
    "c": Language(("c",), "main.c", "gcc -O2 -std=c11 -o {folder}/main {folder}/main.c -lm", "{folder}/main"),
}  # fmt: skip


def _seconds(value: Any) -> Any:
    """ "2.0 seconds", as some datasets have it."""
    words = re.fullmatch(r"\s*([0-9.]+)\s*(?:s|sec|secs|seconds?)?\s*", value) if isinstance(value, str) else None
    return float(words[1]) if words and words[1].count(".") < 2 and words[1] != "." else value


class Test(NamedTuple):
    """One test. `fn` is "" for a program that reads `input` and prints; else `input` is the JSON text of its arguments.

    `right` are the right outputs, any of which will do: texts, or for a function JSON texts.
    """

    fn: str
    input: str
    right: list[str]


class CodeTask(BaseModel):
    """The question, its tests in one of the datasets' forms, and how programs are run.

    The policy is asked `prompt` (text or messages) as it stands, where there is one; else `question` (LiveCodeBench:
    `question_content`) with `starter_code`, and how to answer.

    Tests: `tests` ([{input, output}], or [{args, expected, fn_name}]), `input_output` (APPS, TACO: JSON text {inputs,
    outputs, fn_name}), `public_test_cases` and `private_test_cases` (LiveCodeBench) with `metadata`, or
    `reward_model.ground_truth` (verl). `time_limit`: CPU seconds a test. `memory_mb`: data of one process, 0 for the
    sandbox's own limit alone. `partial`: the reward is the share of passed tests.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    question: str = ""
    question_content: str = ""
    prompt: str | list[dict[str, Any]] = ""
    starter_code: str | None = ""
    fn_name: str = ""
    tests: str | list[dict[str, Any]] | None = None
    input_output: str | dict[str, Any] | None = None
    public_test_cases: str | list[dict[str, Any]] | None = None
    private_test_cases: str | list[dict[str, Any]] | None = None
    metadata: str | dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    language: str = "python"
    file: str = ""
    compile: str = ""
    command: str = ""
    image: str = ""
    time_limit: Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=600)] = 4.0
    memory_mb: Annotated[int, Field(ge=0)] = 1024
    partial: bool = False
    checker: Literal["lines", "tokens", "exact"] = "lines"
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    solution: str = ""
    solutions: str | list[str] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> CodeTask:
        if not (self.question.strip() or self.question_content.strip() or self.prompt):
            raise ValueError("it has no question: give `question`, `question_content` or `prompt`")
        if self.language not in LANGUAGES and not (self.command and self.file):
            known = ", ".join(LANGUAGES)
            raise ValueError(
                f"language {self.language!r} is none of {known}: for another one give `command` and `file`, such as "
                "'node {folder}/main.js' and 'main.js'"
            )
        return self

    def how(self) -> Language:
        """How its programs are run."""
        plain = LANGUAGES.get(self.language, Language((self.language,), "", "", ""))
        return Language(
            plain.marks, self.file or plain.file, self.compile or ("" if self.command else plain.compile),
            self.command or plain.run,
        )  # fmt: skip

    def right_program(self) -> str | None:
        """A program that solves it, where the task has one."""
        if self.solution.strip():
            return self.solution
        texts = self.solutions
        if isinstance(texts, str) and texts.lstrip().startswith("["):
            texts = _json(texts, "solutions")
        return (texts if isinstance(texts, str) else str(texts[0])) if texts else None


def tests_of(task: dict[str, Any]) -> list[Test]:
    """All tests of a task's plain map. Raises TaskError, which names the field."""
    truth = (task.get("reward_model") or {}).get("ground_truth")
    found: list[Test] = []
    for field, value in (
        ("tests", task.get("tests")),
        ("input_output", task.get("input_output")),
        ("ground_truth", truth),
    ):
        if value and not found:
            value = _json(value, field)
            found = _of_table(value, task, field) if isinstance(value, dict) else _of_rows(value, task, field)
    for field in () if found else ("public_test_cases", "private_test_cases"):
        if task.get(field):
            found += _of_rows(_json(_unpacked(task[field], field), field), task, field)
    if not found:
        raise TaskError(
            "the task has no tests: give `tests`, `input_output`, `public_test_cases`/`private_test_cases` or "
            "`reward_model.ground_truth`"
        )
    if any(test.fn for test in found) and (task["language"] != "python" or task["command"]):
        raise TaskError("tests of a function (fn_name) are for python without a `command` of its own")
    for at, test in enumerate(found):
        try:
            "".join((test.input, *test.right)).encode()
        except UnicodeEncodeError as error:
            raise TaskError(f"test {at + 1} of the task is no proper text: {error}") from None
    return found


def _of_table(table: dict[str, Any], task: dict[str, Any], field: str) -> list[Test]:
    """APPS's form: parallel lists of inputs and outputs; of a function, an output may stand in a list of its own."""
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise TaskError(f"field {field!r} must hold two lists of one length, `inputs` and `outputs`")
    name = str(table.get("fn_name") or task.get("fn_name") or "")
    if not name:
        return [Test("", _lines(given), [_lines(right)]) for given, right in zip(inputs, outputs, strict=True)]
    tests = []
    for given, right in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            tests.append(Test(name, _arguments(given, field), _values(_literal(right))))
            continue
        rights = _values(right)
        if isinstance(right, list) and len(right) < 2:
            rights += _values(right[0] if right else None)
        tests.append(Test(name, _text(given if isinstance(given, list) else [given], field), rights))
    return tests


def _of_rows(rows: Any, task: dict[str, Any], field: str) -> list[Test]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TaskError(f"field {field!r} must be a list of maps, one for each test")
    about = _json(task.get("metadata") or {}, "metadata")
    named = (about.get("func_name") if isinstance(about, dict) else "") or ""
    return [_of_row(row, str(task.get("fn_name") or named), f"{field}[{at}]") for at, row in enumerate(rows)]


def _of_row(row: dict[str, Any], named: str, field: str) -> Test:
    kind = row.get("testtype") or row.get("type")
    name = str(row.get("fn_name") or ("" if kind in ("stdin", "stdin_stdout") else named))
    if kind == "functional" and not name:
        raise TaskError(
            f"{field} tests a function, but neither it nor the task says which (fn_name, metadata.func_name)"
        )
    right = next((row[key] for key in ("expected", "output", "expected_output") if key in row), _MISSING)
    if right is _MISSING:
        raise TaskError(f"{field} has no `output` and no `expected`")
    if not row.keys() & {"input", "args", "kwargs"}:
        raise TaskError(f"{field} has no `input` and no `args`; it has: {', '.join(row)}")
    others = list(row.get("alternatives") or [])
    if not name:
        return Test("", _lines(row.get("input", row.get("args", ""))), [_lines(item) for item in (right, *others)])
    given = row.get("kwargs") or row.get("args", row.get("input"))
    if isinstance(given, str):
        arguments = _arguments(given, field)
        right = _literal(right) if "expected" not in row else right
    else:
        arguments = _text(given if isinstance(given, list | dict) else [] if given is None else [given], field)
    return Test(name, arguments, [text for item in (right, *others) for text in _values(item)])


_MISSING = object()


def _values(right: Any) -> list[str]:
    """The JSON texts that are right; where the output is empty, a function that returns nothing is right too."""
    return [_text(right, "output"), *(["null"] if right == "" else [])]


def _literal(right: Any) -> Any:
    """An output that is given as text: JSON, else the text itself."""
    if not isinstance(right, str):
        return right
    try:
        return json.loads(right) if right.strip() else ""
    except ValueError:
        return right


def _arguments(given: str, field: str) -> str:
    """One argument a line, each as JSON."""
    return _text([_json(line, f"{field}'s input") for line in given.splitlines() if line.strip()], field)


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else "" if value is None else str(value)


def _text(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"field {field!r} is {value!r:.80}, which is no JSON: {error}") from None


def _json(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"field {field!r} is {value!r:.80}, which is no JSON: {error}") from None


def _unpacked(value: Any, field: str) -> Any:
    """LiveCodeBench packs its hidden tests: JSON text, pickled, compressed, as base64."""
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return value
    try:
        return _TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(value, validate=True)))).load()
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise TaskError(
            f"field {field!r} is {value!r:.40}: neither JSON nor packed as LiveCodeBench does: {error}"
        ) from None


class _TextOnly(pickle.Unpickler):
    """Reads plain values; nothing that is named there is ever imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")
