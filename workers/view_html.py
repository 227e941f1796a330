"""One rollout's trajectory as a small page that needs nothing else: text coloured by the loss mask."""

from __future__ import annotations

import html
import json

from workers import view
from workers.dossier import Dossier

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
body { color: #222; background: #fff }
h1 { font-size: 1.3em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { text-align: left; padding: .15em 1em .15em 0; vertical-align: top }
th { font-weight: 600; color: #555 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: 1em }
pre { font: 13px/1.5 ui-monospace, monospace }
.sampled { background: #c9f0cf }
.prompt { color: #777 }
.observation { background: #d7ecfa }
"""


def page(found: Dossier, decode: view.Decode | None) -> str:
    """The whole page. All text of the task, the policy and the tools is escaped."""
    title = html.escape(str(found.about["id"]))
    facts = "".join(
        _row(name, found.about.get(name))
        for name in ("now", "handler", "outcome", "reward", "parts", "truncated", "kind", "why", "task")
    )
    body = "".join(
        f"<h2>sequence {number}</h2><pre>{text}</pre>" for number, text in enumerate(_sequences(found, decode), 1)
    )
    legend = (
        '<p><span class="sampled">sampled by the policy: loss mask 1</span> &nbsp; <span class="prompt">prompt</span> '
        '&nbsp; <span class="observation">observation</span></p>'
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
    return [
        "".join(
            f'<span class="{"sampled" if span.sampled else span.kind}">{html.escape(span.text)}</span>'
            for span in sequence
        )
        for sequence in view.spans(found.trajectory, decode)
    ]
