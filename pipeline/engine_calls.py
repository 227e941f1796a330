"""One HTTP call to a policy server, under a time limit; what goes wrong with it is an EngineError, of five kinds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pipeline.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    import aiohttp

Fault = Literal["dead", "hang", "overload", "misfit", "refused"]
"""dead: no connection, or the engine behind the server is gone. hang: no reply in time. overload: it sends us away for
now. misfit: it lacks what we need (path, model, shape). refused: it answered with an error of any other kind."""

TIMEOUT = 10.0
"""Seconds for one call where nobody says how many, and at most for its connection."""


class EngineError(PolicyError):
    """A policy server can't do what it was asked. `fault` tells the cases apart (see Fault)."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class EngineCalls:
    """Calls to the server at `url`. `timeout`: seconds for one call, where the call gives none of its own.

    Each call raises EngineError. `session`: an aiohttp session to use; without one the engine opens and closes its own.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession | None = None, *, timeout: float = TIMEOUT) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")  # some name a server by the path of its OpenAI interface
        self.timeout = timeout
        self._session = session
        self._owned = session is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the engine's own session; a given one stays open. Safe twice."""
        if self._owned and self._session is not None:
            await self._session.close()
            self._session = None

    async def healthy(self) -> bool:
        """What `/health` says; True proves little: a server that hangs may still answer it."""
        try:
            status, _ = await self._send("GET", "/health")
        except EngineError:
            return False
        return status == 200

    async def _send(
        self,
        method: str,
        path: str,
        asked: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, bytes]:
        """Status and body. Raises EngineError where no reply came, ConfigError where the URL is none."""
        import aiohttp

        limit = self.timeout if timeout is None else timeout
        if self._session is None:
            # A kept connection may be closed by the server just when a POST goes out, which nobody may send twice;
            # a proxy of the environment is not for the line.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        limits = aiohttp.ClientTimeout(total=limit, sock_connect=min(limit, TIMEOUT))
        try:
            async with self._session.request(
                method, f"{self.url}{path}", json=asked, params=params, timeout=limits
            ) as reply:
                return reply.status, await reply.read()
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{self.url!r} is no URL of a policy server: {error}") from None
        except aiohttp.ConnectionTimeoutError:
            raise EngineError("dead", f"{self.url}: no connection within {min(limit, TIMEOUT):g} s") from None
        except TimeoutError:
            raise EngineError("hang", f"{self.url}{path}: no reply within {limit:g} s") from None
        except aiohttp.ClientConnectorError as error:
            why = os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
            raise EngineError("dead", f"{self.url}: cannot connect ({why})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError("dead", f"{self.url}{path}: {error or type(error).__name__}") from error

    async def _judged(self, status: int, body: bytes, path: str) -> EngineError:
        """The error of a status; whether behind a 500 or 503 the engine is dead, `/health` knows."""
        failure = self._failure(status, body, path)
        if status in (500, 503) and not await self.healthy():
            return EngineError("dead", str(failure))
        return failure

    def _failure(self, status: int, body: bytes, path: str) -> EngineError:
        fault: Fault = "refused"
        if status in (429, 503):
            fault = "overload"
        elif status in (403, 404, 405):
            fault = "misfit"
        elif status in (502, 504) or (status == 500 and b"EngineCore" in body):
            fault = "dead"
        return EngineError(fault, f"{self.url}{path}: HTTP {status}: {error_text(body)}")

    def _field(self, body: bytes, name: str) -> Any:
        try:
            return json.loads(body)[name]
        except (ValueError, KeyError, TypeError):
            raise EngineError("misfit", f"{self.url} answers without {name}: {error_text(body)[:100]}") from None


def error_text(body: bytes) -> str:
    """The server's own sentence in an error reply: one line, at most 500 characters."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return " ".join(str(found).split())[:500]
