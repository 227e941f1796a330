"""Where settings come from, and how a wrong one is told: file, variables, `--set`, merged over the defaults.

Each value remembers its origin, so that the sentence names the place where the mistake was made.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.errors import ConfigError

Keys = tuple[str, ...]


class _StrictLoader(yaml.SafeLoader):
    """YAML's plain types; a key given twice is an error instead of a silent last-one-wins."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str) -> Any:
    """One YAML document of plain types, strictly. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_StrictLoader)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises ConfigError."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path.name}: can't be read: {error.strerror} ({path})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: is not valid YAML: {_one_line(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name}: wanted sections such as 'redis:', found {_shown(data)}")
    return data


class Merged:
    """Nested settings that remember for each key where it came from.

    `data` starts as the defaults; `fields` is the model that knows sections from values; `origin` names the file.
    """

    def __init__(self, data: dict[str, Any], *, fields: type[BaseModel], origin: str) -> None:
        self.data = data
        self.fields = fields
        self.origin = origin
        self._origins: dict[Keys, str] = {}

    def put_file(self, values: Mapping[str, Any]) -> None:
        """Lay a file's values over the defaults, section by section; a mapping that is a value replaces the default."""
        for keys, value in _leaves(values, self.fields):
            self._set(keys, value, "")

    def put_variables(self, environ: Mapping[str, str], *, prefix: str, special: frozenset[str]) -> None:
        """ROLLOUT_REDIS__URL sets redis.url. An unknown variable with the prefix is a ConfigError."""
        for name in sorted(environ):
            if not name.startswith(prefix) or name in special:
                continue
            keys = tuple(name.removeprefix(prefix).lower().split("__"))
            if not self._known(keys):
                valid = [*sorted(special), *(_variable(prefix, known) for known in sorted(_settings(self.fields)))]
                near = difflib.get_close_matches(name, valid, n=1)
                guess = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"{name}: unknown variable ({guess}valid: {', '.join(valid)})")
            self.put(keys, self._scalar(keys, environ[name]), origin=name)

    def put_overrides(self, overrides: Sequence[str]) -> None:
        """`section.key=value` texts, as given to `--set`; the value is read as a YAML scalar."""
        for text in overrides:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"--set {text}: wanted section.key=value")
            keys = tuple(name.strip().split("."))
            self.put(keys, self._scalar(keys, value), origin=f"--set {text}")

    def put(self, keys: Keys, value: Any, *, origin: str) -> None:
        """Set one value by its path. Unknown keys are told by `explain`, after the models have looked at all."""
        if isinstance(value, Mapping) and _field(self.fields, keys) is not None and _is_section(self.fields, keys):
            for inner, item in _leaves(value, typing.cast(type[BaseModel], _field(self.fields, keys))):
                self._set(keys + inner, item, origin)
            return
        self._set(keys, value, origin)

    def explain(self, error: ValidationError) -> str:
        """One sentence for each mistake, with where it was made, the key, the value and what is wanted."""
        return "; ".join(self._sentence(item) for item in error.errors())

    def _set(self, keys: Keys, value: Any, origin: str) -> None:
        place = self.data
        for key in keys[:-1]:
            inner = place.get(key)
            if not isinstance(inner, dict):
                inner = place[key] = {}
            place = inner
        place[keys[-1]] = value
        if origin:
            self._origins[keys] = origin

    def _known(self, keys: Keys) -> bool:
        """A setting, or an item of a setting that is a mapping (line.lanes.train, policies.judge.url)."""
        mappings = _mappings(self.fields)
        return keys in _settings(self.fields) or any(keys[:end] in mappings for end in range(1, len(keys)))

    def _scalar(self, keys: Keys, text: str) -> Any:
        """The YAML value of a text; where text is wanted, the text itself ("no" is a fine model name)."""
        wants_text = _field(self.fields, keys) is str
        try:
            value = parse_yaml(text)
        except yaml.YAMLError:
            return text
        return text if wants_text and not isinstance(value, str) else value

    def _sentence(self, item: Any) -> str:
        keys = tuple(str(key) for key in item["loc"] if key != "[key]")
        place = next((origin for known, origin in reversed(self._origins.items()) if _related(known, keys)), "")
        head = f"{place or self.origin}: {'.'.join(keys)}"
        if item["type"] == "extra_forbidden":
            return f"{head}: {unknown_key(keys[-1], sorted(_keys_at(self.fields, keys[:-1])))}"
        section = f"a section with {', '.join(sorted(_keys_at(self.fields, keys)))}"
        return f"{head}: {is_wrong(item, section if item['type'] == 'model_type' else '')}"


def unknown_key(key: str, valid: Sequence[str]) -> str:
    """What is said of a key that is none of the valid ones."""
    near = difflib.get_close_matches(key, valid, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"unknown key ({guess}valid: {', '.join(valid)})"


def is_wrong(item: Any, wanted: str = "") -> str:
    """What is said of a value, one of `ValidationError.errors()`: the value, and what is wanted instead."""
    if item["type"] == "literal_error":
        wanted = wanted or f"one of {item['ctx']['expected'].replace(' or ', ', ').replace(chr(39), '')}"
    wanted = wanted or _WANTED.get(item["type"]) or item["msg"].removeprefix("Input should be ")
    wanted = wanted.replace("String should match pattern", "text that matches")
    return f"{_shown(item.get('input'))} is wrong, wanted {wanted}"


_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text (in quotes)",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "too_short": "at least one entry",
    "missing": "a value",
}


def _related(one: Keys, other: Keys) -> bool:
    """Whether one path is the other, or leads to it."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _leaves(values: Mapping[str, Any], fields: type[BaseModel], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Paths and values of a nested mapping, down to what the model says is a value (or does not know)."""
    for key, value in values.items():
        field = fields.model_fields.get(key)
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, Mapping):
            yield from _leaves(value, inner, (*above, key))
        elif isinstance(inner, type) and issubclass(inner, BaseModel) and value is None:
            continue  # a section whose every key is commented out
        else:
            yield (*above, key), value


def _field(fields: type[BaseModel], keys: Keys) -> Any:
    """The declared type at a path, or None where the models know no such path."""
    here: Any = fields
    for key in keys:
        if typing.get_origin(here) is dict:  # an entry of a mapping: datasets.mine, policies.judge
            here = typing.get_args(here)[1]
            continue
        if not (isinstance(here, type) and issubclass(here, BaseModel)) or key not in here.model_fields:
            return None
        here = here.model_fields[key].annotation
    return here


def _is_section(fields: type[BaseModel], keys: Keys) -> bool:
    here = _field(fields, keys)
    return isinstance(here, type) and issubclass(here, BaseModel)


def _keys_at(fields: type[BaseModel], keys: Keys) -> list[str]:
    return list(_field(fields, keys).model_fields) if _is_section(fields, keys) else []


def _settings(fields: type[BaseModel], above: Keys = ()) -> set[Keys]:
    """The path of every setting (not of the sections)."""
    found: set[Keys] = set()
    for key, field in fields.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= _settings(inner, (*above, key))
        else:
            found.add((*above, key))
    return found


def _mappings(fields: type[BaseModel]) -> set[Keys]:
    return {keys for keys in _settings(fields) if typing.get_origin(_field(fields, keys)) is dict}


def _variable(prefix: str, keys: Keys) -> str:
    return prefix + "__".join(keys).upper()


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
