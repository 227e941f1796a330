"""What a rollout in the browser is worth: the answer compared, and what the site was sent."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipeline.errors import GraderError
from pipeline.interfaces import Reward

SHOWN = 300
"""Characters of an answer or a value that stand in the evidence."""

RIGHT = {"answer": "the answer is right", "state": "the site was sent what was asked for"}

_TAG = re.compile(r"</?answer>", re.IGNORECASE)


class Form(BaseModel):
    """What must have been sent: `form` once, with these fields; others are not looked at. None: empty, or not there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: str
    fields: dict[str, Any]


def answer_in(text: str) -> str:
    """What stands between the last <answer> and its </answer>; all of the text where there is no such pair."""
    begin, found = None, None
    for tag in _TAG.finditer(text):  # one pass, whatever the text is
        if tag[0][1] != "/":
            begin = tag.end()
        elif begin is not None:
            begin, found = None, text[begin : tag.start()]
    return (text if found is None else found).strip()


def same_answer(said: str, right: str) -> bool:
    """Equal but for upper case, spaces, quotes around it and a full stop at its end; numbers by value."""
    one, other = _plain(said), _plain(right)
    numbers = [_number(text) for text in (one, other)]
    return one == other or (None not in numbers and numbers[0] == numbers[1])


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().strip("\"'` ").removesuffix(".").strip()


def _number(text: str) -> float | None:
    return (
        float(text.replace(",", "")) if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})*(\.\d+)?|[-+]?\d+(\.\d+)?", text) else None
    )


def differences(wanted: Form, sent: list[dict[str, Any]]) -> list[str]:
    """Sentences about what is wrong with what was sent; none where all is right."""
    forms = [item["fields"] for item in sent if item["form"] == wanted.form]
    if not forms:
        others = sorted({item["form"] for item in sent})
        return [f"{wanted.form!r} was never sent" + (f" (sent was: {', '.join(others)})"[:SHOWN] if others else "")]
    if len(forms) > 1:
        return [f"{wanted.form!r} was sent {len(forms)} times, once is wanted"]
    return [
        f"{name} is {forms[0].get(name)!r:.{SHOWN}}, wanted {want!r:.{SHOWN}}"
        for name, want in wanted.fields.items()
        if not _same_value(forms[0].get(name), want)
    ]


def _same_value(got: Any, want: Any) -> bool:
    if want is None:
        return got in (None, "", [])
    if isinstance(want, str | int | float) and isinstance(got, str | int | float):
        return " ".join(str(got).split()) == " ".join(str(want).split())
    return bool(got == want)


def grade(answers: tuple[str, ...], check: Form | None, said: str, state: dict[str, Any]) -> Reward:
    """The score of one rollout; `state` is what `run` left. Raises GraderError where it left nothing."""
    if check is not None and "sent" not in state:
        raise GraderError("run left no record of what the site was sent: nothing can be compared")
    sent = state.get("sent", [])
    parts, wrong = {}, []
    if answers:
        given = answer_in(said)
        parts["answer"] = float(any(same_answer(given, right) for right in answers))
        if not parts["answer"]:
            wrong.append(f"the answer is {given!r:.{SHOWN}}, wanted {answers[0]!r:.{SHOWN}}")
    if check is not None:
        found = differences(check, sent)
        parts["state"] = float(not found)
        wrong += found
    web = state.get("web", {})
    evidence = {
        "why": "; ".join(wrong) or " and ".join(RIGHT[name] for name in parts),
        "answer": answer_in(said)[:SHOWN],
        "sent": [{"form": item["form"], "fields": repr(item["fields"])[:SHOWN]} for item in sent[:10]],
        "visited": state.get("visited", [])[:50],
        "screenshots": state.get("screenshots", [])[:20],
        "calls": web.get("calls", 0),
        "browsers": 1 + web.get("restarts", 0),
    }
    return Reward(value=min(parts.values()), parts=parts, evidence=evidence)
