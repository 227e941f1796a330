"""Chat formats for tests: a tokenizer with the control tokens of several families, and two chat templates."""

from __future__ import annotations

import atexit
import functools
import tempfile

from workers.policy import tokenizer as tokenizers

SPECIAL = (
    *tokenizers.SPECIAL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",  # Qwen 3.5
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",  # GLM 4.5
    "]~!b[", "]~b]", "[e~[",  # MiniMax M2
    *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),  # noqa: RUF001
)  # fmt: skip
MARKUP = (
    *tokenizers.MARKUP, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<minimax:tool_call>", "</minimax:tool_call>",
)  # fmt: skip


@functools.cache
def folder() -> str:
    """Folder of a tokenizer that fits qwen3, llama-3, qwen3.5, prime-qwen3, glm-4.5 and minimax-m2; made once."""
    place = tempfile.TemporaryDirectory(prefix="rollout-formats-")
    atexit.register(place.cleanup)
    tokenizers.make(place.name, special=SPECIAL, markup=MARKUP)
    return place.name


_QWEN3_TOOLS = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>"
)
_QWEN3_CALLS = (
    "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}'
    "\\n</tool_call>"
)

LIKE_QWEN3 = (
    """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + '"""
    + _QWEN3_TOOLS
    + """' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '"""
    + _QWEN3_CALLS
    + """<|im_end|>\\n' }}
{%- elif system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
)
"""Renders as the library's `qwen3` does."""

CHATML = """
{%- if tools %}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
"""A format that the library does not know, with calls as JSON inside <tool_call>."""
