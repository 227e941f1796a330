"""Opens what a worker process shares among its attempts: policy client, ways to sandboxes, child server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import handlers
from pipeline.config import TRAINED, Config
from pipeline.queue import Queue
from workers.children import Children
from workers.parts import Stock
from workers.stages import Workshop


def handlers_path(config: Config) -> str:
    """The folder on whose modules `module:Class` is looked up: handlers.path, else the config's folder, else here."""
    if config.handlers.path:
        return str(Path(config.handlers.path).expanduser().resolve())
    return str(config.source.parent.resolve() if config.source else Path.cwd())


async def open_workshop(
    config: Config,
    path: str,
    *,
    children: bool = True,
    queue: Queue | None = None,
    worker: str = "",
    alone: bool = False,
) -> Workshop:
    """What attempts need. `queue` opens the registry of policy servers, `worker` is this one's name there.

    Without a queue there is a policy only where the config names one. Sandboxes of other processes are reached through
    their hosts; `alone`: there are none (a trial). One of this process is opened when the first is wanted.
    """
    shop = Workshop(config=config, handlers_path=path)
    if not alone:
        from workers.sandbox.client import Hosts

        shop.hosts = Hosts(config.lease.seconds, queue.silent if queue is not None else None)

    async def open_stock() -> Stock:
        from workers.sandbox.host import Host

        host = shop.host = await Host.open(config, "")
        return host.stock

    shop.open_stock = open_stock

    def policy(name: str) -> Any:
        if queue is None and not config.policy_of(name).url:
            return None
        from workers.policy.client import open_policy

        return open_policy(config, queue, worker, name)

    shop.open_policy, shop.policy = policy, policy(TRAINED)
    if children:
        shop.children = Children(
            config,
            path,
            _preload(config, path),
            lambda: _alone(config, shop.policy),
            worker if queue is not None else "",
        )
        shop.compute = shop.children.function
    return shop


def _alone(config: Config, policy: Any) -> Config:
    """The settings of a child that runs one rollout alone; the tokenizer is the one that is known by now."""
    if policy is None:
        return config
    return config.changed({"policy.tokenizer": policy.tokenizer_folder})


def _preload(config: Config, path: str) -> tuple[str, ...]:
    """Modules that the handlers need which are loaded at start; others have theirs imported with their first call."""
    found = {module for name in config.handlers.load for module in handlers.load(name, path).preload}
    return tuple(sorted(found))


async def close(shop: Workshop) -> None:
    """Close what `open_workshop` opened."""
    if isinstance(shop.children, Children):
        shop.children.close()
    if shop.host is not None:
        await shop.host.close()
    if shop.hosts is not None:
        await shop.hosts.close()
    for policy in (shop.policy, *shop.policies.values()):
        if policy is not None:
            await policy.close()
