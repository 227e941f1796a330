"""What a handler's `sandbox` map may ask for: each mistake is one sentence with the key, the value, what is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import HandlerError
from workers.sandbox.box import NETWORK_FORMS, Allow, Spec

HEAD = "the handler's `sandbox` can't be met: "


def said(asked: dict[str, Any]) -> str:
    with pytest.raises(HandlerError) as caught:
        Spec.of(asked)
    return str(caught.value)


@pytest.mark.parametrize(
    "network", ["internet", {"allow": "a.example"}, {"alow": ["x"]}, {"allow": ["x"], "y": 1}, ["x"]]
)
def test_a_wrong_network_is_told_with_the_forms_that_there_are(network: Any) -> None:
    assert said({"network": network}) == f"{HEAD}network: {network!r} is wrong, wanted {NETWORK_FORMS}"


def test_the_forms_that_are_told_are_right() -> None:
    assert Spec.of({"network": {"allow": ["example.org", "*.example.org:8443"]}}).network == Allow(
        allow=["example.org", "*.example.org:8443"]
    )
    assert "allow" in NETWORK_FORMS and (Spec.of({"network": "host"}).network, Spec.of({}).network) == ("host", "none")


def test_an_unknown_key_is_told_with_the_nearest_and_all() -> None:
    assert said({"imgae": "x"}).startswith(f"{HEAD}imgae: unknown key (did you mean image? valid: image, files, env, ")


def test_a_wrong_value_is_told_without_the_keys() -> None:
    assert said({"env": {"A": 1}}) == f"{HEAD}env.A: 1 is wrong, wanted text (in quotes)"
    assert said({"files": ["a"]}) == f"{HEAD}files: ['a'] is wrong, wanted a mapping"
    assert said({"files": {"/x": ""}}) == f"{HEAD}files: the file '/x' must be a relative path inside the home"


def test_all_mistakes_are_told_at_once() -> None:
    assert said({"imgae": "x", "network": "x"}).count(" is wrong, wanted ") == 1
    assert "imgae: unknown key" in said({"imgae": "x", "network": "x"})
