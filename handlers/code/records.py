"""The runner's records: cut out of its file, checked by their keyed digest, and each test's output compared.

`packed` and `graded` are called in a child process; `cut` only counts lengths.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import Any

from handlers.code.compare import same
from handlers.code.task import CodeTask, tests_of
from pipeline.errors import TaskError

HEAD = 4 + hashlib.sha256().digest_size
SHOWN = 300
"""Characters of an input, an expected and a found output that the evidence holds."""

MB = 1 << 20
LONGEST = 48 * MB
"""Bytes of one record; of an output not half as many are allowed, as JSON may make it longer."""


def packed(task: dict[str, Any], program: str, secret: str, total: float | None) -> dict[str, Any]:
    """The runner's `job` (bytes) and the `tests`, each as [fn, input, right outputs], which stay outside.

    Raises TaskError for tests that can't be read.
    """
    checked = CodeTask.model_validate(task)
    tests, how = tests_of(checked.model_dump()), checked.how()
    files = {how.file: program.encode("utf-8", "replace").decode()}
    if called := any(test.fn for test in tests):
        files["caller.py"] = Path(__file__).with_name("caller.py").read_text(encoding="utf-8")
    longest = max(len(text.encode()) for test in tests for text in test.right)
    output = (1 + 2 * longest // MB) * MB
    if output > LONGEST // 2 - MB:
        raise TaskError(f"an expected output has {longest / MB:.0f} MB; at most {LONGEST // 4 // MB - 1} can be judged")
    job = {
        "secret": secret,
        "files": files,
        "compile": how.compile.split(),
        "run": how.run.split(),
        "call": ["python3", "{folder}/caller.py"] if called else [],
        "tests": [{"fn": test.fn, "input": test.input} for test in tests],
        "seconds": checked.time_limit,
        "memory": checked.memory_mb * MB,
        "output": output,
        "stop": not checked.partial,
        "total": total,
    }
    return {"job": gzip.compress(json.dumps(job).encode(), 1), "tests": [list(test) for test in tests]}


def cut(data: bytes) -> tuple[list[bytes], int]:
    """The whole records at the beginning of `data`, and how many bytes they take. One that is too long is no record."""
    found: list[bytes] = []
    at = 0
    while len(data) - at >= HEAD:
        end = at + HEAD + int(struct.unpack_from(">I", data, at)[0])
        if end - at > LONGEST:
            return [*found, data[at:]], len(data)
        if end > len(data):
            break
        found.append(data[at:end])
        at = end
    return found, at


def graded(
    records: list[bytes], secret: str, first: int, tests: list[list[Any]], checker: str, tolerance: float
) -> list[dict[str, Any]]:
    """What the records say. `first`: number of the first one; `tests`: those that come next, at least one a record.

    A test's map has `passed` and, where it did not, `why`, `input`, `expected`, `got`, `stderr`. From the first record
    on that the runner did not write, there is only one of the kind `forged`.
    """
    said: list[dict[str, Any]] = []
    tested = 0
    for number, record in enumerate(records, first):
        data = record[HEAD:]
        right = hmac.digest(bytes.fromhex(secret), struct.pack(">Q", number) + data, "sha256")
        if not hmac.compare_digest(record[4:HEAD], right):
            return [*said, {"kind": "forged"}]
        told = json.loads(data)
        if told["kind"] == "test":
            fn, given, rights = tests[tested]
            told = _verdict(told, fn, given, rights, checker, tolerance)
            tested += 1
        said.append(told)
    return said


def _verdict(
    told: dict[str, Any], fn: str, given: str, right: list[str], checker: str, tolerance: float
) -> dict[str, Any]:
    ended = told["how"] == "ended"
    passed = ended and same(bool(fn), told["output"], right, checker, tolerance)
    verdict = {"kind": "test", "passed": passed, "seconds": told["seconds"], "cpu": told["cpu"]}
    if passed:
        return verdict
    why = ("the function returned something else" if fn else "wrong output") if ended else how_it_ended(told, bool(fn))
    return {
        **verdict, "why": why, "input": given[:SHOWN], "expected": right[0][:SHOWN], "got": told["output"][:SHOWN],
        "stderr": told["stderr"],
    }  # fmt: skip


def how_it_ended(told: dict[str, Any], called: bool = False) -> str:
    """In words, of a run that did not end well."""
    return {
        "exit": f"{'the function raised, or ended the process' if called else 'the program failed'} "
        f"(exit code {told['code']})",
        "signal": f"the program was killed by signal {-told['code']}",
        "cpu": f"over the limit of CPU time, after {told['cpu']} s of it",
        "wall": f"still running after {told['seconds']} s",
        "output": "it printed too much",
        "silent": "the process ended before the function returned",
    }[told["how"]]
