"""Real vLLM's chat completions: they say which ids they read and sampled, and take no prefix; so it is refused."""

from __future__ import annotations

import orjson
import pytest

from pipeline import chat
from pipeline.engine import Engine, EngineError
from tests.vllm.servers import MODEL, Served
from workers.policy import reply

PARAMS = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "seed": 7}


def test_a_reply_says_what_was_read_and_sampled(smollm2: Served) -> None:
    """The form that `pipeline.chat` reads, from the server that NeMo RL builds on."""
    messages = [{"role": "user", "content": "Say a word."}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    for tools in ([], [tool]):
        answer = smollm2.call(chat.PATH, {"model": MODEL, **chat.asked(messages, tools, (), PARAMS)})
        prompt, ids, evidence = chat.told(answer)
        assert prompt
        assert ids
        assert evidence is not None
        assert [int(token) for token, _ in evidence] == ids
        shown = {"model": MODEL, "messages": messages, **({"tools": tools} if tools else {})}
        rendered = smollm2.call("/tokenize", shown)
        assert prompt == rendered["tokens"]
        read = reply.read(orjson.dumps(answer), "r", "chat", prompt, 8)
        assert (read.ids, read.prompt) == (ids, None)


async def test_a_plain_vllm_is_no_engine_of_nemo_rl(smollm2: Served) -> None:
    async with Engine(smollm2.url, timeout=60) as engine:
        with pytest.raises(EngineError, match="takes no required_prefix_token_ids") as caught:
            await engine.probe(MODEL, "chat")
        assert caught.value.fault == "misfit"
