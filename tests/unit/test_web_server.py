"""The server of a site: its files and nothing else, and a record of what forms and scripts have sent."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from handlers.web.inside import server

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
JSON = {"Content-Type": "application/json"}


class Site:
    """A running server of a folder with one page, and its record."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "sent.json"
        (folder / "site" / "sub").mkdir(parents=True)
        (folder / "site" / "index.html").write_text("hello")
        self._server = server.Server(
            ("127.0.0.1", 0),
            partial(server.Site, directory=str(folder / "site"), state=server.State(self.record)),
        )
        self._thread = threading.Thread(target=partial(self._server.serve_forever, poll_interval=0.01))
        self._thread.start()

    def ask(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Any:
        connection = http.client.HTTPConnection(*self._server.server_address[:2], timeout=10)
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, reply.headers.get("Location"), text

    def sent(self) -> Any:
        return json.loads(self.record.read_text())

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_it_serves_the_sites_files_alone(site: Site) -> None:
    assert site.ask("GET", "/") == (200, None, "hello")
    for path in ("/none.html", "/sub/", "/../sent.json", "/%2e%2e/sent.json", "/send/f"):
        assert site.ask("GET", path)[0] == 404, path
    assert site.sent() == []


def test_it_records_what_is_sent(site: Site) -> None:
    assert site.ask("POST", "/send/f", "a=x+y&b=&c=1&c=2", FORM)[:2] == (303, "/f-sent.html")
    assert site.ask("POST", "/send/f", '{"items": {"clip": 2}}', JSON)[:2] == (303, "/f-sent.html")
    assert site.sent() == [
        {"form": "f", "fields": {"a": "x y", "b": "", "c": ["1", "2"]}},
        {"form": "f", "fields": {"items": {"clip": 2}}},
    ]


def test_what_is_no_form_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.ask("POST", "/index.html", "a=1", FORM)[0] == 404
    assert site.ask("POST", "/send/f", "[1]", JSON)[0] == 400
    assert site.ask("POST", "/send/f", "{", JSON)[0] == 400
    monkeypatch.setattr(server, "MOST_BYTES", 3)
    assert site.ask("POST", "/send/f", "a=12", FORM)[0] == 413
    monkeypatch.setattr(server, "MOST_SENT", 0)
    assert site.ask("POST", "/send/f", "a=1", FORM)[0] == 429
    assert site.sent() == []


def test_a_server_that_is_started_again_goes_on_with_its_record(tmp_path: Path) -> None:
    path = tmp_path / "sent.json"
    assert server.State(path).add("f", {"a": "1"})
    assert server.State(path).add("f", {"a": "2"})
    assert [item["fields"]["a"] for item in json.loads(path.read_text())] == ["1", "2"]
