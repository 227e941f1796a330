"""One rollout's trajectory as a small page that needs nothing else: text coloured by the loss mask.

Each sampled token stands by itself: the paler, the likelier; a mark stands where other weights went on, and pointing at
a token shows its id, its logprob and the weights' version.
"""

from __future__ import annotations

import html
import json

from pipeline.trajectory import Sequence
from workers import view, view_evidence_html
from workers.dossier import Dossier
from workers.evidence import cut
from workers.view_rollout import NAMES

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 64em; padding: 0 1em; }
body { color: #222; background: #fff }
h1 { font-size: 1.4em; margin-bottom: .2em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin: 1.6em 0 .4em }
h3 { font-size: 1em; margin: 1.2em 0 .2em }
table { border-collapse: collapse; margin: .4em 0 }
td, th { text-align: left; padding: .15em 1.2em .15em 0; vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 600; color: #555; white-space: nowrap }
.text, td { white-space: pre-wrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; border-radius: 4px; padding: .8em 1em }
pre { font: 13px/1.5 ui-monospace, monospace; margin: .2em 0 }
pre.log { background: #f7f7f7; max-height: 34em; overflow: auto }
ul { margin: .2em 0; padding-left: 1.4em } li { font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere }
summary { cursor: pointer; color: #555; font-weight: 600; margin: .6em 0 }
.now, .note { color: #777; font-weight: 400 }
.reward { font-size: 1.2em; margin: .6em 0 } .reward b { font-size: 1.3em }
.why { border-left: 4px solid #c7a008; background: #fdf8e3; padding: .5em .8em; white-space: pre-wrap }
.failed { border-left-color: #c0392b; background: #fdecea }
.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: inline-block; width: 8em; height: .6em; background: #eee; border-radius: 3px; overflow: hidden }
.bar i { display: block; height: 100%; background: #3fae55 }
.pictures { display: flex; flex-wrap: wrap; gap: 1em } figure { margin: 0; max-width: 30em }
img { max-width: 100%; border: 1px solid #ddd } figcaption { font-size: 12px; color: #777 }
.sampled { background: #c9f0cf }
.p0 { background: #e3f6e6 } .p1 { background: #c9f0cf } .p2 { background: #9fe0aa } .p3 { background: #6fcb80 }
.p4 { background: #3fae55; color: #fff }
.weights { background: #ffe08a; color: #664d00; border-radius: .3em; padding: 0 .3em; font-size: 11px }
.prompt { color: #777 }
.observation { background: #d7ecfa }
"""

FACTS = (
    "handler", "outcome", "truncated", "kind", "at", "host", "exit", "losses", "seconds", "worked", "retry_of",
    "trajectory", "weights",
)  # fmt: skip

BOUNDS = (-0.1, -0.7, -2.3, -4.6)
"""Logprobs of 90, 50, 10 and 1 percent: a token below one is shown darker."""

FIELD = 20_000
"""Characters of one field of the task."""

LIKELY = ("over 90 %", "over 50 %", "over 10 %", "over 1 %", "less")


def page(found: Dossier, decode: view.Decode | None) -> str:
    """The whole page. All text of the task, the policy and the tools is escaped."""
    title = html.escape(str(found.about["id"]))
    about = dict(found.about)
    if found.trajectory is not None:
        about |= {"trajectory": view.size_said(found.trajectory), "weights": view.weights_said(found.trajectory)}
    facts = "".join(_row(NAMES.get(name, name), _fact(name, about.get(name))) for name in FACTS)
    why = f'<p class="why failed">{html.escape(str(about["why"]))}</p>' if about.get("why") else ""
    scored = view_evidence_html.reward(about.get("reward"), about.get("parts") or {}, found.evidence, found.artifacts)
    rest = (
        f'<h1>{title}</h1><p class="now">{html.escape(str(about.get("now", "")))}</p>{why}{scored}'
        f"{_log(found)}<h2>rollout</h2><table>{facts}</table>{_task(about.get('task'))}{_attempts(found)}"
        f"{_trajectory(found, decode)}"
    )
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body>{rest}</body></html>\n'


def _fact(name: str, value: object) -> object:
    if name in NAMES and isinstance(value, int | float):
        return view.seconds(value) if value else ""
    return "" if value == 0 else value


def _log(found: Dossier) -> str:
    return f'<h3>the end of its log</h3><pre class="log">{html.escape(found.log)}</pre>' if found.log else ""


def _task(data: object) -> str:
    if not isinstance(data, dict) or not data:
        return ""
    rows = "".join(_row(str(name), value) for name, value in data.items())
    return f"<details><summary>task ({len(data)} fields)</summary><table>{rows}</table></details>"


def _attempts(found: Dossier) -> str:
    if not found.attempts:
        return ""
    rows = ""
    for item in found.attempts:
        cells = [item.get("stage"), item.get("attempt"), view.seconds(item.get("seconds")), item.get("outcome"),
                 str(item.get("error", "")).partition("\n")[0][:300]]  # fmt: skip
        rows += f"<tr>{''.join(f'<td>{html.escape(str(cell or str()))}</td>' for cell in cells)}</tr>"
    logs = "".join(
        f"<h3>{html.escape(str(item.get('stage')))}, attempt {html.escape(str(item.get('attempt')))}</h3>"
        f'<pre class="log">{html.escape(str(item["log"]))}</pre>'
        for item in found.attempts
        if item.get("log")
    )
    head = "".join(f"<th>{name}</th>" for name in ("stage", "attempt", "took", "outcome", "error"))
    more = f"<details><summary>logs of the attempts</summary>{logs}</details>" if logs else ""
    return f"<h2>attempts</h2><table><tr>{head}</tr>{rows}</table>{more}"


def _trajectory(found: Dossier, decode: view.Decode | None) -> str:
    body = "".join(
        f"<h3>sequence {number}{': the history was rendered anew' if number > 1 else ''}</h3><pre>{text}</pre>"
        for number, text in enumerate(_sequences(found, decode), 1)
    )
    legend = (
        "<p>sampled by the policy, loss mask 1, by the probability that it had: "
        + " ".join(f'<span class="p{at}">{name}</span>' for at, name in enumerate(LIKELY))
        + '<br>mask 0: <span class="prompt">prompt</span> <span class="observation">observation</span></p>'
    )
    return f"<h2>trajectory</h2>{legend}{body}" if body else "<p>It has no trajectory (yet).</p>"


def _row(name: str, value: object) -> str:
    if value in (None, "", {}, []):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = cut(text, FIELD)
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
