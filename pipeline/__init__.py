"""The contract that a trainer, a worker and a handler share. A trainer imports this package alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.client import RolloutClient as RolloutClient
    from pipeline.envelope import Task as Task
    from pipeline.errors import (
        Incomplete as Incomplete,
        MemoryHigh as MemoryHigh,
        PolicyError as PolicyError,
        QueueFull as QueueFull,
    )
    from pipeline.groups import GroupPolicy as GroupPolicy
    from pipeline.interfaces import AgentHandler as AgentHandler, Context as Context, Reward as Reward
    from pipeline.results import Group as Group, Rollout as Rollout
    from pipeline.sync_client import SyncRolloutClient as SyncRolloutClient
    from pipeline.weights import Update as Update

_WHERE = {
    "AgentHandler": "pipeline.interfaces",
    "Context": "pipeline.interfaces",
    "Group": "pipeline.results",
    "GroupPolicy": "pipeline.groups",
    "Incomplete": "pipeline.errors",
    "MemoryHigh": "pipeline.errors",
    "PolicyError": "pipeline.errors",
    "QueueFull": "pipeline.errors",
    "Reward": "pipeline.interfaces",
    "Rollout": "pipeline.results",
    "RolloutClient": "pipeline.client",
    "SyncRolloutClient": "pipeline.sync_client",
    "Task": "pipeline.envelope",
    "Update": "pipeline.weights",
}

__all__ = [
    "AgentHandler",
    "Context",
    "Group",
    "GroupPolicy",
    "Incomplete",
    "MemoryHigh",
    "PolicyError",
    "QueueFull",
    "Reward",
    "Rollout",
    "RolloutClient",
    "SyncRolloutClient",
    "Task",
    "Update",
]


def __getattr__(name: str) -> Any:
    """Import lazily: a worker's child process needs the interfaces and not the client."""
    if name not in _WHERE:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r} (it offers {', '.join(_WHERE)})")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
