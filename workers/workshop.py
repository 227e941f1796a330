"""Opens what a worker process shares among its attempts: policy client, sandbox driver, child server."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import handlers
from pipeline.config import Config
from pipeline.connection import redacted
from workers.children import Children
from workers.stages import Workshop


def handlers_path(config: Config) -> str:
    """The folder on whose modules `module:Class` is looked up: handlers.path, else the config's folder, else here."""
    if config.handlers.path:
        return str(Path(config.handlers.path).expanduser().resolve())
    return str(config.source.parent.resolve() if config.source else Path.cwd())


def sandbox_root(config: Config) -> Path:
    """The folder of this line's sandboxes: two lines of one user never sweep each other's."""
    root = config.path_of(config.sandbox.root) if config.sandbox.root else None
    root = root or Path(tempfile.gettempdir()) / f"rollout-sandboxes-{os.getuid()}"
    line = hashlib.sha256(f"{redacted(config.redis.url)} {config.line.name}".encode()).hexdigest()[:8]
    return root / f"{config.line.name}-{line}"


async def open_workshop(config: Config, path: str, *, children: bool = True) -> Workshop:
    """What attempts need. A policy is opened only where the config names one; the driver always."""
    from workers.sandbox import driver

    shop = Workshop(config=config, handlers_path=path)
    shop.driver = driver(config.sandbox.driver, sandbox_root(config), config.sandbox.command_timeout)
    if config.policy.url:
        from workers.policy.client import open_policy

        shop.policy = open_policy(config)
    if children:
        shop.children = Children(config, path, _preload(config, path))
    return shop


def _preload(config: Config, path: str) -> tuple[str, ...]:
    """Modules that the known handlers' plain methods need."""
    names = [*handlers.BUILT_IN, *config.handlers.load]
    found = {module for name in names for module in handlers.load(name, path).preload}
    return tuple(sorted(found))


async def close(shop: Workshop) -> None:
    """Close what `open_workshop` opened."""
    if isinstance(shop.children, Children):
        shop.children.close()
    if shop.policy is not None:
        await shop.policy.close()
