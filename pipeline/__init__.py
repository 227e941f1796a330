"""The contract that a trainer, a worker and a handler share. A trainer imports this package alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.client import RolloutClient as RolloutClient
    from pipeline.envelope import Task as Task
    from pipeline.interfaces import AgentHandler as AgentHandler
    from pipeline.sync_client import SyncRolloutClient as SyncRolloutClient

_WHERE = {
    "AgentHandler": "pipeline.interfaces",
    "RolloutClient": "pipeline.client",
    "SyncRolloutClient": "pipeline.sync_client",
    "Task": "pipeline.envelope",
}

__all__ = ["AgentHandler", "RolloutClient", "SyncRolloutClient", "Task"]


def __getattr__(name: str) -> Any:
    """Import lazily: a worker's child process needs the interfaces and not the client."""
    if name not in _WHERE:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r} (it offers {', '.join(_WHERE)})")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
