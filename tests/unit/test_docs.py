"""The docs keep up with the code: links resolve, commands and keys and words are all there."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import click
import pytest

from pipeline import audit
from workers.cli.app import rollout

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)]*))?\)")
KEYS = runpy.run_path(str(ROOT / ".ci" / "keys_page.py"))
QUEUE = (ROOT / "pipeline" / "queue.py").read_text(encoding="utf-8")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def shell_lines(page: str) -> list[str]:
    """The commands in a page's sh blocks, each on one line."""
    blocks = re.findall(r"```sh\n(.*?)```", page.replace("\\\n", " "), re.DOTALL)
    return [
        line.strip() for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")
    ]


def all_commands(group: click.Group, before: str = "rollout") -> list[str]:
    found = []
    for name, command in group.commands.items():
        found += all_commands(command, f"{before} {name}") if isinstance(command, click.Group) else [f"{before} {name}"]
    return found


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    page = ROOT / name
    links = [(link, at) for link, at in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link, _ in links if link and not (page.parent / link).exists()]
    assert missing == []
    wrong = [f"{link}#{at}" for link, at in links if at and at not in anchors(page.parent / link if link else page)]
    assert wrong == []


def imported(page: str) -> set[tuple[str, str]]:
    """(module, name) of what a page's Python takes from the line."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(compile(textwrap.dedent(block), "page", "exec", flags))]
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {
        (node.module, alias.name)
        for node in taken
        if node.module and node.module.partition(".")[0] in ("pipeline", "workers", "handlers")
        for alias in node.names
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "```python" in text(name)])
def test_what_the_docs_import_is_there(name: str) -> None:
    found = imported(text(name))
    assert [f"{module}.{taken}" for module, taken in found if not hasattr(importlib.import_module(module), taken)] == []


@pytest.mark.parametrize("command", all_commands(rollout))
def test_every_command_stands_in_the_docs(command: str) -> None:
    assert f"| `{command}" in text("docs/operate.md")


@pytest.mark.parametrize("page", [name for name in NAMES if "```sh" in text(name)])
def test_commands_in_the_docs_exist_with_their_options(page: str) -> None:
    """Each `rollout ...` in a block of commands parses: right words, right options."""
    for line in shell_lines(text(page)):
        words = shlex.split(line.removesuffix("&"), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words or words[0] != "rollout":
            continue
        words = words[: words.index("--")] if "--" in words else words
        group: click.Command = rollout
        words = words[1:]
        while isinstance(group, click.Group):
            assert words and words[0] in group.commands, line
            group, words = group.commands[words[0]], words[1:]
        options = {name for item in group.params for name in item.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line


def test_the_page_of_keys_is_the_queues_head() -> None:
    assert text("docs/redis-keys.md") == KEYS["page"](QUEUE), "say `make docs`"


def test_the_table_of_keys_is_read_whole() -> None:
    """So that a row whose form the generator does not know is not dropped in silence."""
    names = [name for key, _, _ in KEYS["rows"](QUEUE) for name in key.split(", ")]
    table = re.search(r"\n    schema .*?\n\n", QUEUE, re.DOTALL)
    assert table is not None
    assert len(KEYS["rows"](QUEUE)) == len(re.findall(r"\n    \S", table[0]))
    assert len(names) == len(set(names)) > 25


def test_the_audit_knows_every_key_and_no_other() -> None:
    names = [name for key, _, _ in KEYS["rows"](QUEUE) for name in key.split(", ")]
    assert {name.partition(":")[0] for name in names} == audit.SINGLE | audit.FAMILIES


def test_the_readme_tells_its_story() -> None:
    readme = text("README.md")
    order = [
        "enqueue",
        "## See it run",
        "make demo",
        "## Change one line",
        "rollout init",
        "rollout try",
        "## What lies where",
        "## Goals",
        "## Non-goals",
    ]
    places = [readme.index(item) for item in order]
    assert places == sorted(places)
    assert "nobody's model" in readme


def test_the_files_that_the_readme_names_are_there() -> None:
    tree = re.search(r"## What lies where\n\n```\n(.*?)```", text("README.md"), re.DOTALL)
    assert tree is not None
    folder = ROOT
    for line in tree[1].splitlines():
        names = line.split("  ")[0 if not line.startswith(" ") else 1].split()
        if not line.startswith(" "):
            folder = ROOT
        for name in names:
            assert list(folder.glob(name.rstrip("/"))), f"{name} in {folder.name}"
        if not line.startswith(" ") and names[0].endswith("/"):
            folder = ROOT / names[0]


def test_the_line_to_change_stands_in_the_template() -> None:
    (line,) = [line for line in text("README.md").splitlines() if line.startswith("SIGN, RIGHT")]
    template = text("workers/template/sums.py.txt")
    assert line in template.splitlines()
    assert f"in {len(template.splitlines())} lines" in text("README.md").replace("\n", " ")


def test_the_docs_speak_of_the_project_alone() -> None:
    for page in PAGES:
        assert not re.search(r"/home/\w|/root/\w", page.read_text(encoding="utf-8"), re.IGNORECASE), page.name


def test_the_glossary_holds_each_word_once() -> None:
    words = re.findall(r"^\| ([a-z ,]+) \|", text("docs/glossary.md"), re.MULTILINE)[1:]
    assert len(words) == len(set(words)) > 25
