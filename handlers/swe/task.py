"""One task of the SWE family: rows of SWE-bench, SWE-Gym, SWE-rebench and their like, as they are; and what follows
from a row: its image, its folder, how its tests are run and how their log is read.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from handlers.swe.diff import split
from pipeline.errors import TaskError

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""Between these marks stands the test command in the `eval_script` of a SWE-bench row."""

CONDA = """\
if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi
"""
"""The images of SWE-bench, SWE-Gym and SWE-rebench hold the tests' Python in a conda environment of this name."""

PYTEST = "pytest -rA"

COMMANDS = {
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
"""Repository of SWE-bench -> its test command, where that is no plain pytest. Rows with an `eval_script` need none."""

PARSERS = {
    "astropy/astropy": "parse_log_astropy",
    "django/django": "parse_log_django",
    "matplotlib/matplotlib": "parse_log_matplotlib",
    "mwaskom/seaborn": "parse_log_seaborn",
    "psf/requests": "parse_log_requests",
    "pylint-dev/pylint": "parse_log_pylint",
    "scikit-learn/scikit-learn": "parse_log_scikit",
    "sphinx-doc/sphinx": "parse_log_sphinx",
    "sympy/sympy": "parse_log_sympy",
}
"""Repository of SWE-bench -> swebench's parser of its log, where a row names none."""

NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Endings of files in a test patch that no runner is given."""


def _listed(value: Any) -> Any:
    """A list of names as it is, or as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value) if value.strip() else []
        except ValueError:
            raise ValueError(f"it is a text, but no JSON list of test names: {value[:80]!r}") from None
    return [] if value is None else value


def _mapped(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value) if value.strip() else {}
        except ValueError:
            raise ValueError(f"it is a text, but no JSON map: {value[:80]!r}") from None
    return {} if value is None else value


def _worded(value: Any) -> Any:
    return "" if value is None else value


Words = Annotated[str, BeforeValidator(_worded)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{7,64}$")]
Folder = Annotated[str, StringConstraints(pattern=r"^/.*[^/]$")]


class SweTask(BaseModel):
    """A row of a dataset as it is, and what a site may add to it.

    Of the dataset: `patch` is the gold one, `test_patch` holds the hidden tests, FAIL_TO_PASS and PASS_TO_PASS are
    lists or JSON text. Ours: `image` (a name of this line, a path or a registry's name; `{instance_id}`, `{repo}` and
    `{name}` in it are filled in), `workdir` (where the repository lies in the image), `prelude` (shell text that comes
    before the tests and before the policy's first command), `test_command`, `log_parser`, `test_timeout` (s),
    `network` and `sandbox` (more keys of the sandbox, such as memory_mb).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: Annotated[str, StringConstraints(min_length=1)]
    repo: Words = ""
    base_commit: Commit
    problem_statement: Annotated[str, StringConstraints(min_length=1)]
    patch: Words = ""
    test_patch: Words = ""
    FAIL_TO_PASS: Names
    PASS_TO_PASS: Names = ()
    version: Annotated[str, BeforeValidator(lambda value: "" if value is None else str(value))] = ""
    hints_text: Words = ""
    interface: Words = ""
    image_name: Words = ""
    docker_image: Words = ""
    install_config: Annotated[dict[str, Any], BeforeValidator(_mapped)] = {}
    eval_script: Words = ""

    image: Words = ""
    workdir: Folder
    prelude: Words = ""
    test_command: Words = ""
    log_parser: Words = ""
    test_timeout: float = Field(default=1800.0, gt=0)
    network: Any = "none"
    sandbox: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _place(cls, data: Any) -> Any:
        """SWE-rebench V2 keeps the repository at `/NAME`, all others at /testbed."""
        if not isinstance(data, dict) or data.get("workdir"):
            return data
        second = "swerebenchv2/" in f"{data.get('image_name')} {data.get('docker_image')}"
        name = PurePosixPath(str(data.get("repo") or "")).name
        return {**data, "workdir": f"/{name}" if second and name else "/testbed"}


def image_of(task: SweTask) -> str:
    """The image to start: the row's `image`, else the dataset's name for it, as `docker://`.

    Rows that name none are SWE-bench's where the id is one of its repositories', else SWE-Gym's.
    """
    if task.image:
        return _as_image(_filled(task.image, task))
    for name in (task.image_name, task.docker_image):
        if name:
            return _as_image(name)
    id = task.instance_id.lower()
    if _is_swebench(task):
        return f"docker://swebench/sweb.eval.x86_64.{id.replace('__', '_1776_')}:latest"
    return f"docker://xingyaoww/sweb.eval.x86_64.{id.replace('__', '_s_')}:latest"


def prelude_of(task: SweTask) -> str:
    """Shell text that makes the tests' environment: the row's, what its `eval_script` does, and conda where it is.

    Of an `eval_script`, what it does to the repository is left out: the evaluation does that itself.
    """
    if task.prelude:
        return task.prelude
    before = _script(task)[0]
    return CONDA + "".join(f"{line}\n" for line in before)


def test_command_of(task: SweTask) -> str:
    """The command that runs the hidden tests, in bash, at `workdir`. Raises TaskError where a test patch is broken.

    The row's `test_command`, else what stands in its `eval_script`, else `install_config.test_cmd`, else what SWE-bench
    does for the repository, else pytest. Where it names none of the test patch's files and is a runner that takes
    files, they are added.
    """
    given = task.install_config.get("test_cmd")
    if task.test_command:
        return task.test_command
    if script := _script(task)[1]:
        return "\n".join(script)
    if isinstance(given, list | tuple):
        given = "\n".join(str(line) for line in given)
    command = str(given or COMMANDS.get(task.repo, PYTEST)).strip()
    files = [name for name in present_test_files(task) if not name.endswith(NO_TESTS)]
    if task.repo == "django/django" and not given:
        files = [_django(name) for name in files]
    elif not takes_files(command) or any(name in command for name in files):
        return command
    return " ".join([command, *map(shlex.quote, files)])


def log_parser_of(task: SweTask) -> str:
    """The name of the parser that reads the tests' log, as swebench has it."""
    named = task.log_parser or task.install_config.get("log_parser") or PARSERS.get(task.repo)
    return str(named or "parse_log_pytest")


def test_files(task: SweTask) -> list[str]:
    """Every path that the test patch touches, deleted and renamed ones too. Raises TaskError where it is no diff."""
    return list(dict.fromkeys(path for part in _test_parts(task) for path in part.paths))


def present_test_files(task: SweTask) -> list[str]:
    """The paths that the test patch leaves in the repository. Raises TaskError where it is no diff."""
    return [part.path for part in _test_parts(task) if not part.deleted]


def fail_to_pass(task: SweTask) -> list[str]:
    """Tests that fail on the base commit and must pass. Raises TaskError where there is none."""
    if not task.FAIL_TO_PASS:
        raise TaskError(f"field 'FAIL_TO_PASS' of {task.instance_id} is empty, so no patch could ever resolve it")
    return list(task.FAIL_TO_PASS)


def pass_to_pass(task: SweTask) -> list[str]:
    """Tests that pass on the base commit and must still pass."""
    return list(task.PASS_TO_PASS)


def takes_files(command: str) -> bool:
    """Whether a command is a test runner of Python's that takes files, with none of its own after it."""
    last = re.split(r"&&|;|\n|\|", command.strip())[-1]
    return bool(re.search(r"(^|[\s/])(pytest|py\.test|tox|bin/test)(\s|$)", last)) and ".py" not in last


def _test_parts(task: SweTask) -> list[Any]:
    try:
        return split(task.test_patch.encode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise TaskError(f"field 'test_patch' of {task.instance_id}: {error}") from None


def _script(task: SweTask) -> tuple[list[str], list[str]]:
    """Lines of an `eval_script`: those that make the environment, and the test command."""
    before: list[str] = []
    tests: list[str] = []
    place, stop = before, ""
    for line in task.eval_script.splitlines():
        if stop:
            stop = "" if line.strip() == stop else stop
        elif START in line:
            place = tests
        elif END in line:
            break
        elif heredoc := re.search(r"<<-?\s*['\"]?(\w+)", line):
            stop = heredoc[1]
        elif place is tests or not re.match(r"#!|set -|git |cd |\s*$", line):
            place.append(line)
    if task.eval_script and place is before:
        raise TaskError(f"field 'eval_script' of {task.instance_id} has no line with {START!r}: set `test_command`")
    return before, tests


def _django(path: str) -> str:
    """Django's runner wants modules: tests/a/b.py is a.b."""
    return path.removesuffix(".py").removeprefix("tests/").replace("/", ".")


def _is_swebench(task: SweTask) -> bool:
    plain = ("matplotlib/matplotlib", "pallets/flask", "pydata/xarray", "pytest-dev/pytest", "psf/requests")
    return task.repo in {*COMMANDS, *PARSERS, *plain}


def _name(task: SweTask) -> str:
    return PurePosixPath(task.repo).name


def _filled(image: str, task: SweTask) -> str:
    for key, value in {"instance_id": task.instance_id, "repo": task.repo, "name": _name(task)}.items():
        image = image.replace(f"{{{key}}}", value)
    return image


def _as_image(name: str) -> str:
    """A registry's name gets its `docker://`; a path or a name of this line stays as it is."""
    known = re.match(r"(docker|oras|library|shub|https?|docker-archive|oci-archive|oci):", name)
    is_path = name.startswith(("/", ".", "~")) or name.endswith(".sif")
    return name if known or is_path or "/" not in name else f"docker://{name}"
