"""Recipes of images: rendered by name with parameters, and named by what is built of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.errors import HandlerError
from workers.sandbox.images import host, recipes


def test_every_recipe_renders_with_no_parameter() -> None:
    assert recipes.names() == ["debian", "host", "python"]
    for name in recipes.names():
        recipe = recipes.render(name)
        assert recipe.about and all(word == word.strip() and " " not in word for word in recipe.packages)


def test_packages_are_added_and_change_the_digest() -> None:
    plain, more = recipes.render("debian"), recipes.render("debian", {"packages": "jq ripgrep"})
    assert set(more.packages) - set(plain.packages) == {"jq", "ripgrep"}
    assert plain.digest() != more.digest() == recipes.render("debian", {"packages": "jq ripgrep"}).digest()


def test_a_suite_is_a_parameter() -> None:
    assert recipes.render("python", {"suite": "trixie"}).suite == "trixie"


def test_the_python_recipe_has_a_kernel_for_the_ipython_tool() -> None:
    assert "python3-ipykernel" in recipes.render("python").packages


@pytest.mark.parametrize("name", ["debian", "python"])
def test_pip_may_install_beside_debians_packages(name: str) -> None:
    assert "break-system-packages = true" in recipes.render(name).script


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("debain", {}, "there is no recipe 'debain' (there are: debian, host, python)"),
        ("debian", {"release": "12"}, "recipes have no parameter 'release' (known: suite, mirror, packages)"),
        ("debian", {"suite": 'x"\nbuilder: host'}, "has a quote, a backslash or a line break in it"),
    ],
)
def test_what_is_wrong_is_a_sentence(name: str, given: dict[str, str], said: str) -> None:
    with pytest.raises(HandlerError) as caught:
        recipes.render(name, given)
    assert said in str(caught.value)


def test_the_host_skeleton_has_a_mount_point_for_each_bind(tmp_path: Path) -> None:
    host.make(tmp_path)
    for bind in host.binds():
        outside, inside, mode = bind.split(":")
        assert outside == inside and mode == "ro"
        assert (tmp_path / inside.lstrip("/")).is_dir() == Path(outside).is_dir()
        assert (tmp_path / inside.lstrip("/")).exists()


def test_the_host_skeleton_holds_this_interpreter_and_no_secrets() -> None:
    places = [Path(bind.partition(":")[0]) for bind in host.binds()]
    for prefix in (sys.prefix, sys.base_prefix):
        assert any(Path(prefix).is_relative_to(place) for place in places)
    for secret in ("/etc/shadow", "/etc/ssl/private", "/etc/pki/tls/private", "/root", "/home", "/etc"):
        assert Path(secret) not in places


def test_the_host_digest_is_the_same_twice() -> None:
    first = host.digest()
    host.digest.cache_clear()
    assert host.digest() == first
