"""Addresses as a policy writes them: whole ones, paths, names of hosts."""

from __future__ import annotations

import re
from urllib.parse import urljoin, urlsplit

LONGEST = 2000
"""Characters of an address; the page that says of a longer one that it is not there would repeat it."""


def whole(url: str, here: str, root: str) -> str:
    """A whole http(s) address; a path goes on from the page `here`, from `root` where that is none of the web's.

    Raises ValueError with a sentence for what is no address, and for what is no page of the web: a file of the sandbox.
    """
    scheme = re.match(r"[a-zA-Z][\w+.-]*:(?!\d)", url)
    if scheme and not re.match(r"https?://", url, re.IGNORECASE):
        raise ValueError(f"{url!r:.200} can't be opened: only http:// and https:// addresses are")
    if len(url) > LONGEST:
        raise ValueError(f"an address of {len(url)} characters can't be opened, at most {LONGEST} are")
    if not url:
        raise ValueError("an empty address can't be opened")
    if not scheme:
        host = re.split(r"[/?#]", url)[0]
        named = "." in host and not host.endswith((".html", ".htm")) and not host.startswith(".")
        url = f"http://{url}" if named else urljoin(here if here.startswith("http") else root, url)
    try:
        found = urlsplit(url).hostname
    except ValueError:
        found = None
    if not found:
        raise ValueError(f"{url!r:.200} is no address")
    return url
