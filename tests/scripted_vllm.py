"""Stands in for the `vllm` program in tests of `rollout serve`: vLLM's flags, and behind them the scripted policy.

    python tests/scripted_vllm.py serve MODEL --served-model-name NAME --host H --port P ...

Nobody's model. MODEL is a folder with a tokenizer.json. Like vLLM it has a process of its own beside the HTTP server
(here one that sleeps for `--engine-sleep` seconds), and it ends with exit code 3 where MODEL has none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import click

from workers.policy import scripted


@click.command()
@click.argument("verb", type=click.Choice(["serve"]))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--served-model-name", "name", required=True)
@click.option("--host", required=True)
@click.option("--port", type=int, required=True)
@click.option("--enable-scale-out", is_flag=True, required=True)
@click.option("--logprobs-mode", type=click.Choice(["processed_logprobs"]), required=True)
@click.option("--scheduling-policy", type=click.Choice(["priority"]), required=True)
@click.option("--max-model-len", type=int, default=4096)
@click.option("--engine-sleep", default="60")
@click.option("--latency", type=float, default=0.0)
@click.option("--latency-per-token", type=float, default=0.0)
def main(model: Path, name: str, host: str, port: int, max_model_len: int, engine_sleep: str, **named: Any) -> None:
    if not (model / "tokenizer.json").is_file():
        click.echo(f"OSError: {model} does not appear to have a file named tokenizer.json")
        raise SystemExit(3)
    if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
        raise SystemExit("VLLM_SERVER_DEV_MODE is not set")
    engine = subprocess.Popen(["sleep", engine_sleep])
    about = {"latency": named["latency"], "latency_per_token": named["latency_per_token"]}
    options = scripted.Options(tokenizer=str(model), model=name, max_model_len=max_model_len, **about)

    async def serve() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        server = await scripted.start(options, port, host)
        click.echo("Application startup complete.")
        await over.wait()
        await server.stop()

    asyncio.run(serve())
    engine.kill()
    click.echo("Finished server process.")


if __name__ == "__main__":
    main()
