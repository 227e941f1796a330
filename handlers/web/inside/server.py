"""The web server of one site, inside the sandbox: files of a folder, and a record of what its forms were sent.

`python server.py SITE STATE PORT_FILE`. GET serves a file of the folder SITE. POST /send/NAME takes a form (or JSON, a
map) and appends {"form": NAME, "fields": {...}} to STATE, a JSON list outside of SITE that the policy can't reach; it
then leads to NAME-sent.html. STATE goes on where it stood, so the server may be started again. Runs by any Python.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

MOST_BYTES = 16_384
"""Of one form."""

MOST_SENT = 50
"""Forms that are kept; what comes later is refused."""


class Site(SimpleHTTPRequestHandler):
    """Serves one request; `state` is shared by all."""

    def __init__(self, *arguments: Any, state: State, **named: Any) -> None:
        self._state = state
        super().__init__(*arguments, **named)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        size = int(self.headers.get("Content-Length") or 0)
        if not path.startswith("/send/") or size > MOST_BYTES:
            self.send_error(404 if size <= MOST_BYTES else 413)
            return
        name = path.removeprefix("/send/")
        try:
            fields = self._fields(self.rfile.read(size))
        except ValueError as error:
            self.send_error(400, str(error))
            return
        if not self._state.add(name, fields):
            self.send_error(429, "too many forms were sent")
            return
        self.send_response(303)
        self.send_header("Location", f"/{name}-sent.html")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _fields(self, body: bytes) -> dict[str, Any]:
        text = body.decode("utf-8", "replace")
        if self.headers.get_content_type() == "application/json":
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError("the JSON is no map")
            return found
        sent = parse_qs(text, keep_blank_values=True)
        return {name: values[0] if len(values) == 1 else values for name, values in sent.items()}

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


class State:
    """The record of what was sent, in a file that is always whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._sent: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else []
        self._write()

    def add(self, form: str, fields: dict[str, Any]) -> bool:
        """Append; False where there is no room."""
        with self._lock:
            if len(self._sent) >= MOST_SENT:
                return False
            self._sent.append({"form": form, "fields": fields})
            self._write()
        return True

    def _write(self) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_text(json.dumps(self._sent), "utf-8")
        os.replace(fresh, self._path)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of a reply is no news."""


def main(site: str, state: str, port_file: str) -> None:
    server = Server(("127.0.0.1", 0), partial(Site, directory=site, state=State(Path(state))))
    fresh = Path(f"{port_file}.new")
    fresh.write_text(str(server.server_address[1]), "utf-8")
    os.replace(fresh, port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:4])
