"""Logs: a sentence for people and fields for machines; and the tail that stays with each attempt."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any

TAIL_BYTES = 4096
"""What is kept of an attempt's log (bytes, the end of it)."""

_FIELDS = ("rollout", "stage", "attempt", "worker", "action")


class AttemptLog(logging.LoggerAdapter[logging.Logger]):
    """The logger of one attempt: its fields are on every line, and the end of what it said is kept in `tail`."""

    def __init__(self, logger: logging.Logger, **about: Any) -> None:
        super().__init__(logger, about)
        self.tail = ""
        self.sampled = 0  # tokens that the policy had sampled when the attempt ended

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if level >= logging.INFO:
            try:
                text = logging.LogRecord("", level, "", 0, msg, args, None).getMessage()
            except (TypeError, ValueError, KeyError):  # as everywhere in logging: a wrong format is shown, not raised
                text = f"{msg} {args}"
            self.keep(f"{time.strftime('%H:%M:%S')} {logging.getLevelName(level).lower()} {text}\n")
        super().log(level, msg, *args, **kwargs)

    def keep(self, text: str) -> None:
        """Add text to the tail without logging it (a child's output)."""
        self.tail = (self.tail + text)[-TAIL_BYTES:]


class _Sentences(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(f"{name}={getattr(record, name)}" for name in _FIELDS if hasattr(record, name))
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {record.getMessage()}"
        text = f"{line}  [{about}]" if about else line
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        line = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage(), **about}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: str = "info", *, as_json: bool = False) -> None:
    """Send our logs to stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _Sentences())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
