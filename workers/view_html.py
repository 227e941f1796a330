"""One rollout's trajectory as a small page that needs nothing else: text coloured by the loss mask.

Each sampled token stands by itself: the paler, the likelier; a mark stands where other weights went on, and pointing at
a token shows its id, its logprob and the weights' version.
"""

from __future__ import annotations

import html
import json

from pipeline.trajectory import Sequence
from workers import view
from workers.dossier import Dossier

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
body { color: #222; background: #fff }
h1 { font-size: 1.3em } h2 { font-size: 1.1em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { text-align: left; padding: .15em 1em .15em 0; vertical-align: top }
th { font-weight: 600; color: #555 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: 1em }
pre { font: 13px/1.5 ui-monospace, monospace }
.sampled { background: #c9f0cf }
.p0 { background: #e3f6e6 } .p1 { background: #c9f0cf } .p2 { background: #9fe0aa } .p3 { background: #6fcb80 }
.p4 { background: #3fae55; color: #fff }
.weights { background: #ffe08a; color: #664d00; border-radius: .3em; padding: 0 .3em; font-size: 11px }
.prompt { color: #777 }
.observation { background: #d7ecfa }
"""

BOUNDS = (-0.1, -0.7, -2.3, -4.6)
"""Logprobs of 90, 50, 10 and 1 percent: a token below one is shown darker."""

LIKELY = ("over 90 %", "over 50 %", "over 10 %", "over 1 %", "less")


def page(found: Dossier, decode: view.Decode | None) -> str:
    """The whole page. All text of the task, the policy and the tools is escaped."""
    title = html.escape(str(found.about["id"]))
    about = dict(found.about)
    if found.trajectory is not None:
        about |= {"trajectory": view.size_said(found.trajectory), "weights": view.weights_said(found.trajectory)}
    facts = "".join(
        _row(name, about.get(name))
        for name in (
            "now",
            "handler",
            "outcome",
            "reward",
            "parts",
            "truncated",
            "kind",
            "why",
            "trajectory",
            "weights",
            "task",
        )
    )
    body = "".join(
        f"<h2>sequence {number}{': the history was rendered anew' if number > 1 else ''}</h2><pre>{text}</pre>"
        for number, text in enumerate(_sequences(found, decode), 1)
    )
    legend = (
        "<p>sampled by the policy, loss mask 1, by the probability that it had: "
        + " ".join(f'<span class="p{at}">{name}</span>' for at, name in enumerate(LIKELY))
        + '<br>mask 0: <span class="prompt">prompt</span> <span class="observation">observation</span></p>'
    )
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
    rest = f"<h1>{title}</h1><table>{facts}</table>{legend}{body or '<p>It has no trajectory (yet).</p>'}"
    return f'<!doctype html><html lang="en">{head}<body>{rest}</body></html>\n'


def _row(name: str, value: object) -> str:
    if value in (None, "", {}, []):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"


def _sequences(found: Dossier, decode: view.Decode | None) -> list[str]:
    if found.trajectory is None:
        return []
    every = found.trajectory.sequences
    last: int | None = None
    shown = []
    for sequence, stretches in zip(every, view.spans(found.trajectory, decode), strict=True):
        text = ""
        for span in stretches:
            if span.version is not None and span.version != last:
                text += f'<span class="weights">weights {span.version}</span>' if last is not None else ""
                last = span.version
            text += _sampled(sequence, span, decode) if span.sampled and decode else _plain(span)
        shown.append(text)
    return shown


def _plain(span: view.Span) -> str:
    return f'<span class="{"sampled" if span.sampled else span.kind}">{html.escape(span.text)}</span>'


def _sampled(sequence: Sequence, span: view.Span, decode: view.Decode) -> str:
    """Token by token."""
    ids = sequence.token_ids[span.start : span.end].tolist()
    made = []
    for start, end, text in view.pieces(ids, decode):
        lowest = float(sequence.logprobs[span.start + start : span.start + end].min())
        depth = sum(lowest < bound for bound in BOUNDS)
        named = " ".join(map(str, ids[start:end]))
        about = f"id {named}, logprob {lowest:.3f}, weights {span.version}"
        made.append(f'<span class="p{depth}" title="{about}">{html.escape(text)}</span>')
    return "".join(made)
