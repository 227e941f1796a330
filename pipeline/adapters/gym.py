"""NeMo Gym's agent server: a row becomes a task, a rollout becomes the answer to `POST /run`.

Sources: NVIDIA-NeMo/Gym, nemo_gym/base_resources_server.py (`BaseRunRequest`, `BaseVerifyResponse`) and
nemo_gym/openai_utils.py (`TokenIDLogProbMixin`); what a caller asserts of it, NVIDIA-NeMo/RL at 00420a15,
nemo_rl/environments/nemo_gym.py (`_postprocess_nemo_gym_to_nemo_rl_result`): items without generation ids are passed
over, and each prompt begins with all tokens of the items before.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pipeline import task_lines
from pipeline.adapters.rows import AdapterError, rows_of, usable
from pipeline.config import DatasetConfig
from pipeline.datasets import tasks_of_rows
from pipeline.envelope import Task
from pipeline.errors import TaskError
from pipeline.interfaces import Parsed, ToolCall
from pipeline.results import Rollout
from pipeline.trajectory import Sequence

PARAMS = "responses_create_params"
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""Of a request's parameters, those that are passed on to the policy: how they are called there."""

TASK_FIELDS = frozenset({"handler", "data", "sampling", "limits", "policy", "deadline"})
OWN = frozenset({PARAMS, "group", "agent_ref", "task_source"})
"""Fields of a row that are the caller's, and no part of a task's bare data; so are those that begin with `_`."""

Read = Callable[[list[int], list[int]], Parsed]
"""(sampled ids, prompt ids) -> the message and the calls that they say."""

MISSHAPEN = ("task", "handler", "fatal", "config", "envelope", "trajectory")
"""Kinds of failures that another try would end in too."""


def task_of(row: Mapping[str, Any], *, handler: str | None = None, dataset: DatasetConfig | None = None) -> Task:
    """The task that a row asks for, under an id of its own. Raises TaskError, UnknownHandler.

    A row names it by `handler` and `data`; else it is the bare data of `handler`; else its columns say it, by `dataset`
    or as known ones. Of `responses_create_params` temperature, top_p and max_output_tokens count, the rest is the
    handler's matter: it has its own prompt and tools.
    """
    params = row.get(PARAMS)
    if not isinstance(params, Mapping):
        raise TaskError(f"a row has the map {PARAMS!r}; this one has {sorted(map(str, row))}")
    task = _named(row, handler, dataset)
    asked = {ours: params[theirs] for theirs, ours in SAMPLING.items() if params.get(theirs) is not None}
    named = {field: getattr(task, field) for field in task_lines.FIELDS}
    named["sampling"] = {**task.sampling, **asked}
    group = group_of(row) or task.id or task.handler.rpartition(":")[2].lower()
    return task_lines.whole({**named, "id": f"{group[:100]}-{uuid.uuid4().hex[:12]}"}, None)


def _named(row: Mapping[str, Any], handler: str | None, dataset: DatasetConfig | None) -> Task:
    if dataset is None and isinstance(row.get("data"), Mapping):
        whole = {name: value for name, value in row.items() if name in TASK_FIELDS and value is not None}
        return task_lines.whole(whole, handler)
    own = {name: value for name, value in row.items() if name not in OWN and not name.startswith("_")}
    shown = dict(row) if dataset is not None else own
    (task,) = tasks_of_rows([shown], dataset=dataset, handler=handler, name="the request")
    return task


def group_of(row: Mapping[str, Any]) -> str:
    """The name that rows of one prompt share: `group`, else Gym's own number of the task; "" where there is none."""
    for name in ("group", "_ng_task_index"):
        if row.get(name) is not None:
            return str(row[name])
    return ""


def status_of(rollout: Rollout) -> int:
    """The HTTP status of a rollout that is no sample: NeMo RL tries 5xx again, as a fault of the infrastructure, and
    takes 4xx for a fault of the row."""
    if rollout.outcome == "cancelled":
        return 409
    return 422 if rollout.failure is not None and rollout.failure.kind in MISSHAPEN else 503


def answer(
    row: Mapping[str, Any], rollout: Rollout, *, model: str = "", created: int = 0, read: Read | None = None
) -> dict[str, Any]:
    """The answer to `/run`: the row itself, and `response`, `reward`, `reward_components`, `rollout`.

    `model` and `created` (Unix time, s) are told as they are. `read` makes messages and calls of ids; without it items
    have ids and no text. Raises AdapterError for a rollout without a reward or sampled tokens, and for one of k > 1
    sequences: their prompts do not continue each other.
    """
    if not usable(rollout):
        raise AdapterError(
            f"rollout {rollout.id} is no sample: its outcome is {rollout.outcome}, and "
            f"{rollout.trajectory.sampled if rollout.trajectory else 0} tokens were sampled"
        )
    (only,) = rows_of(rollout, "refuse")
    output, prompt, sampled = _output(rollout.id, only.sequence, read)
    params = dict(row[PARAMS])
    response = {
        "id": f"resp_{rollout.id}", "object": "response", "created_at": created, "model": model, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if rollout.truncated in ("length", "context") else None,
        "instructions": None, "metadata": {}, "output": output, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": params.get("tools") or [], "temperature": params.get("temperature"), "top_p": params.get("top_p"),
        "usage": {
            "input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
            "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    return {
        **row, PARAMS: params, "response": response, "reward": rollout.reward,
        "reward_components": dict(rollout.parts), "mask_sample": False,
        "rollout": {
            "id": rollout.id, "versions": list(rollout.versions or ()), "truncated": rollout.truncated,
            "staleness": rollout.staleness, "seconds": rollout.seconds, "group": group_of(row),
        },
    }  # fmt: skip


def _output(id: str, sequence: Sequence, read: Read | None) -> tuple[list[dict[str, Any]], int, int]:
    """The output items, and how many tokens were read before the first sampled one, and sampled.

    The last item of each model call has the ids: its prompt is everything before the call.
    """
    output: list[dict[str, Any]] = []
    ids, logprobs = sequence.token_ids.tolist(), sequence.logprobs.tolist()
    spans = _calls(sequence)
    for number, (start, end) in enumerate(spans):
        said = read(ids[start:end], ids[:start]) if read is not None else None
        items = _items(f"{id}-{number}", said)
        items[-1] |= {
            "prompt_token_ids": ids[:start],
            "generation_token_ids": ids[start:end],
            "generation_log_probs": logprobs[start:end],
        }
        output += items
    return output, spans[0][0], sum(end - start for start, end in spans)


def _calls(sequence: Sequence) -> list[tuple[int, int]]:
    """Where sampled tokens stand. A reply that was aborted and gone on with is one."""
    spans: list[tuple[int, int]] = []
    for turn in sequence.turns:
        if turn.kind != "action" or turn.end == turn.start:
            continue
        if spans and spans[-1][1] == turn.start:
            spans[-1] = (spans[-1][0], turn.end)
        else:
            spans.append((turn.start, turn.end))
    return spans


def _items(id: str, said: Parsed | None) -> list[dict[str, Any]]:
    """A model call's items: what it thought, what it said, what it called; at least one."""
    message: Mapping[str, Any] = said.message if said is not None else {}
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs_{id}", "type": "reasoning", "summary": summary})
    calls = [call for call in (said.calls if said is not None else ()) if call.arguments is not None]
    if message.get("content") or not calls:
        items.append(_message(id, message.get("content") or ""))
    return items + [_call(call) for call in calls]


def _message(id: str, text: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _call(call: ToolCall) -> dict[str, Any]:
    about = {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id}
    return {**about, "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
