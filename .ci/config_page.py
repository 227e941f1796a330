"""Makes docs/config.md from config.yaml: `make docs`. A test compares the page with what this prints."""

import re
import sys
from pathlib import Path

HEAD = """# Settings

Made from [config.yaml](../config.yaml) by `make docs`: change that file, not this page.

A setting comes from, later ones winning: the built-in default, the file (`--config FILE`, else `ROLLOUT_CONFIG`, else
`./config.yaml` if there is one), a variable (`ROLLOUT_REDIS__URL=...` sets `redis.url`), `--set redis.url=...`.
Values of variables and of `--set` are read as YAML. Relative paths start at the config file's folder, without a file
at the current one. An unknown key, an unknown `ROLLOUT_` variable or a wrong type is an error that says where it
stands and what is wanted. Times are in seconds unless the name says otherwise.
"""
LINE = re.compile(r"^(?P<indent> *)(?P<key>[a-z_]+):(?: (?P<value>[^#]*?))?(?:  # (?P<why>.*))?$")


def page(text: str) -> str:
    """The page for a config.yaml whose lines are `key: value  # unit; reason`."""
    lines = [HEAD]
    comment: list[str] = []
    path: list[str] = []
    for raw in text.splitlines():
        if raw.startswith("#"):
            comment.append(raw.lstrip("# "))
            continue
        match = LINE.match(raw)
        if match is None:
            comment = []
            continue
        depth = len(match["indent"]) // 2
        path = [*path[:depth], match["key"]]
        if depth == 0:
            lines.append(
                f"\n## {match['key']}\n\n{' '.join(comment)}\n\n| setting | default | unit, and why |\n|---|---|---|"
            )
        elif match["value"] or match["why"]:
            value = f"`{match['value']}`" if match["value"] else "see below"
            lines.append(f"| `{'.'.join(path)}` | {value} | {match['why'] or ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page((Path(__file__).parent.parent / "config.yaml").read_text(encoding="utf-8")))
