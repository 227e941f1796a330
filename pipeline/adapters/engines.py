"""A trainer that owns its engines (verl, NeMo RL) offers them to the line and says when it has moved their weights.

    async with offered(client, addresses, kind="openai", version=0):
        ...
        async with weights_moved(client, step) as servers:
            await manager.update_weights(step)      # the trainer's own broadcast

The trainer starts and ends the engines and moves the weights; the line finds them in its registry, sends them the
rollouts' calls, and holds these while the weights move.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pipeline.backends import Backend
from pipeline.client import RolloutClient
from pipeline.errors import PolicyError
from pipeline.registration import Registration, register
from pipeline.weights import Mode


@contextlib.asynccontextmanager
async def offered(
    client: RolloutClient,
    addresses: Iterable[str],
    *,
    kind: str = "vllm",
    model: str = "",
    tokenizer: str = "",
    version: int | None = None,
) -> AsyncIterator[tuple[str, ...]]:
    """These servers are in the line's registry while the block runs; gives their ids.

    `addresses`: URLs, or host:port as verl's LLMServerManager.get_addresses() tells them. `kind`, `model`, `tokenizer`,
    `version`: as for `RolloutClient.register_backend`; each server must generate a token. All are registered, or none:
    raises PolicyError (one does not answer, there is none) and ConfigError (a wrong address or kind, a taken id).
    """
    urls = [address if "://" in address else f"http://{address}" for address in addresses]
    if not urls:
        raise PolicyError("the trainer has no engine to offer: its list of addresses is empty. Start its servers first")
    async with contextlib.AsyncExitStack() as stack:
        ids = []
        for url in urls:
            registration: Registration = await register(
                client.config, url, client.name, kind=kind, model=model, tokenizer=tokenizer, version=version
            )
            stack.push_async_callback(registration.close)
            ids.append(registration.id)
        yield tuple(ids)


@contextlib.asynccontextmanager
async def weights_moved(
    client: RolloutClient, version: int, *, mode: Mode = "wait"
) -> AsyncIterator[tuple[Backend, ...]]:
    """No token is sampled while the block runs, which moves weights `version` to the servers that it is given.

    They go on with that version when it ends. An error in the block leaves them without a version, so that they get no
    call before the next move; the old weights stay in force, and the error comes out. `mode`: what becomes of calls
    that run. Raises PolicyError where no server can take weights, or the version does not rise.

    The block may be long: a trainer whose engines sleep while it trains enters it before they do.
    """
    began: asyncio.Future[tuple[Backend, ...]] = asyncio.get_running_loop().create_future()
    moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def move(servers: tuple[Backend, ...]) -> None:
        began.set_result(servers)
        await moved

    update = asyncio.create_task(client.update_weights(version, move=move, mode=mode), name=f"weights-{version}")
    first: list[asyncio.Future[Any]] = [began, update]
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not began.done():
            update.result()  # it raises: no server could be held
        yield began.result()
    except BaseException as error:
        if began.done() and not moved.done():  # done: the update itself was broken off
            moved.set_exception(error if isinstance(error, Exception) else PolicyError("the move was broken off"))
        else:
            update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        raise
    moved.set_result(None)
    await update
