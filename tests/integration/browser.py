"""A browser for tests of the web family, and a sandbox that it runs in."""

from __future__ import annotations

import shutil

from tests.services import require


def require_browser() -> None:
    """Skip, or fail where CI=true, without Chromium (either of Debian's two) or bubblewrap."""
    require("bwrap")
    if shutil.which("chromium") is None:
        require("chromium-headless-shell")
