"""Recipes: small templates beside this module that say what an image is made of, rendered by name with parameters."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import HandlerError

FOLDER = Path(__file__).with_name("recipes")
DEFAULT_SUITE = "bookworm"
"""Where this machine is no Debian; its archive is reached at Debian's own address then."""


class Recipe(BaseModel):
    """One recipe, rendered. `suite` is Debian's; `packages` come with what they depend on; `script` runs last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    builder: str = Field(pattern="^(host|debian)$")
    suite: str = ""
    mirror: str = ""
    variant: str = "essential"
    packages: list[str] = Field(default_factory=list)
    script: str = ""

    def digest(self) -> str:
        """Names what is built of it: the same recipe is built once."""
        return hashlib.sha256(json.dumps(self.model_dump(exclude={"about"}), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Parameters:
    """What the templates may ask for."""

    suite: str
    mirror: str = ""
    packages: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Parameters:
        """The given ones over this machine's. Raises HandlerError for one that is unknown."""
        known = cls.__dataclass_fields__
        for name in given:
            if name not in known:
                raise HandlerError(f"recipes have no parameter {name!r} (known: {', '.join(known)})")
        for name, value in given.items():
            if any(mark in value for mark in "\n\"'\\"):
                raise HandlerError(f"parameter {name}: {value!r} has a quote, a backslash or a line break in it")
        return cls(**{"suite": own_suite() or DEFAULT_SUITE, **given})


def names() -> list[str]:
    """All recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def render(name: str, given: Mapping[str, str] | None = None) -> Recipe:
    """The recipe `name` with parameters filled in. Raises HandlerError: no such recipe or parameter."""
    if name not in names():
        raise HandlerError(f"there is no recipe {name!r} (there are: {', '.join(names())})")
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    filled = Template(text).substitute(Parameters.of(given or {}).__dict__)
    try:
        recipe = Recipe.model_validate(yaml.safe_load(filled))
    except ValidationError as error:
        first = error.errors()[0]
        raise HandlerError(f"recipe {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    packages = [word for entry in recipe.packages for word in entry.split()]
    return recipe.model_copy(update={"packages": packages})


def own_suite() -> str:
    """The Debian suite of this machine; empty where it is another system."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return ""
    return release.get("VERSION_CODENAME", "") if release.get("ID") == "debian" else ""
