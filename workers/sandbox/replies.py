"""What host and client say to each other: numbered actions, results, and errors by code.

An error travels as a code out of the table below and a sentence; no class is ever rebuilt from a name that the other
side sent, and an unknown code is a SandboxError.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from pipeline import wire
from pipeline.errors import HandlerError, LineError, SandboxError, SandboxGone, Stale
from pipeline.interfaces import Cell, Output

VERSION = "v1"
"""Of the interface: the first part of every path."""

KEY_HEADER = "X-Rollout-Key"
NAME_HEADER = "X-Rollout-Sandbox"

VERBS = ("bash", "ipython", "read", "write", "edit", "upload", "download")


class Fenced(Stale):
    """Another attempt uses this sandbox now."""


CODES: dict[str, type[LineError]] = {
    "fenced": Fenced,
    "gone": SandboxGone,
    "handler": HandlerError,
    "sandbox": SandboxError,
}


def digest(verb: str, args: dict[str, Any]) -> bytes:
    """Names what was asked: a repeat that asks another thing under the same number is no repeat."""
    return hashlib.blake2b(wire.pack([verb, sorted(args.items())]), digest_size=16).digest()


def pack_result(value: Any) -> bytes:
    return wire.pack({"ok": list(value) if isinstance(value, Output | Cell) else value})


def pack_error(error: BaseException) -> bytes:
    """The error as code and sentence. OSError keeps its errno, ValueError its text; what is not ours is `sandbox`."""
    for code, cls in CODES.items():
        if type(error) is cls:
            return wire.pack({"error": code, "text": str(error)})
    if isinstance(error, LineError):
        return wire.pack({"error": "sandbox", "text": str(error)})
    if isinstance(error, OSError) and error.errno:
        return wire.pack({"error": "os", "errno": error.errno, "text": error.filename or ""})
    if isinstance(error, ValueError):
        return wire.pack({"error": "value", "text": str(error)})
    return wire.pack({"error": "sandbox", "text": f"{type(error).__name__}: {error}"})


def read_reply(data: bytes, verb: str) -> Any:
    """The result of an action. Raises what the host met: a LineError by code, OSError, ValueError."""
    reply = wire.unpack(data)
    if not isinstance(reply, dict) or not ({"ok", "error"} & reply.keys()):
        raise SandboxError(f"the sandbox host answered {data[:80]!r}: another version of this package?")
    if "error" in reply:
        raise _error(reply)
    value = reply["ok"]
    if verb == "bash":
        return Output(*value)
    if verb == "ipython":
        text, error, images, timed_out = value
        return Cell(text, error, tuple(images), timed_out)
    return value


def _error(reply: dict[str, Any]) -> Exception:
    code, text = str(reply["error"]), str(reply.get("text", ""))
    if code == "os":
        number = int(reply.get("errno", 0))
        return OSError(number, os.strerror(number), text or None)
    if code == "value":
        return ValueError(text)
    return CODES.get(code, SandboxError)(text)
