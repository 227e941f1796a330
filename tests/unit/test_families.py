"""Which chat format a model speaks: found by its folder, by its name, or played from its own template."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError, TaskError
from pipeline.interfaces import Message
from tests.unit import formats
from tests.unit.formats import CHATML, LIKE_QWEN3
from workers.policy import families, tokenizer as tokenizers
from workers.policy.rendering import Rendering

LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
ASKED: list[Message] = [{"role": "user", "content": "q"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    tokenizers.make(place / "qwen")
    tokenizers.make(place / "llama", special=LLAMA, markup=())
    tokenizers.make(place / "none", special=("<|stop|>",), markup=())
    return {name: place / name for name in ("qwen", "llama", "none")}


def folder(made: Path, place: Path, template: str | None = None, **files: Any) -> str:
    """A model's folder: the tokenizer that was made, a template, and JSON files by name."""
    place.mkdir(exist_ok=True)
    shutil.copy(made / "tokenizer.json", place)
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    for name, about in files.items():
        (place / f"{name}.json").write_text(json.dumps(about))
    return str(place)


def test_template_of_the_folder_proves_the_family(made: dict[str, Path], tmp_path: Path) -> None:
    assert Rendering(folder(made["qwen"], tmp_path, LIKE_QWEN3)).renderer == "qwen3"


def test_template_that_differs_in_one_line_is_played_itself(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = LIKE_QWEN3.replace("You may call one or more functions", "You may call functions")
    rendering = Rendering(folder(made["qwen"], tmp_path, other))
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert rendering.renderer == "default"
    assert "the trainer pays for the whole prefix again; tool calls are read as JSON inside <tool_call>" in said.message


def test_name_in_the_files_settles_what_the_library_renders_otherwise_on_purpose(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only histories differ: the library's own choice for this very model."""
    old = LIKE_QWEN3.replace("\\n</think>\\n\\n", "\\n</think>\\n\\n\\n")
    assert Rendering(folder(made["qwen"], tmp_path, old)).renderer == "default"
    named = folder(made["qwen"], tmp_path / "Qwen3-8B", old)
    assert Rendering(named).renderer == "qwen3"
    named = folder(made["qwen"], tmp_path / "other", old, config={"_name_or_path": "Qwen/Qwen3-8B"})
    assert Rendering(named).renderer == "qwen3"
    wrong = folder(made["qwen"], tmp_path / "Qwen3-4B", CHATML)
    assert Rendering(wrong).renderer == "default"


@pytest.mark.parametrize(("kit", "renderer"), [("qwen", "qwen3"), ("llama", "llama-3")])
def test_folder_without_template_goes_by_its_control_tokens(made: dict[str, Path], kit: str, renderer: str) -> None:
    assert Rendering(str(made[kit])).renderer == renderer


def test_folder_that_says_nothing_is_a_sentence(made: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"neither a chat template nor .* name one of auto, default, .*qwen3"):
        Rendering(str(made["none"]))
    with pytest.raises(ConfigError, match=r"has no chat template to play: add its chat_template\.jinja"):
        Rendering(str(made["none"]), "default")


def test_model_name_chooses_its_renderer(made: dict[str, Path]) -> None:
    assert Rendering(str(made["qwen"]), "PrimeIntellect/Qwen3-0.6B").renderer == "prime-qwen3"
    assert Rendering(str(made["llama"]), "meta-llama/Llama-3.2-1B-Instruct").renderer == "llama-3"


def test_wrong_name_lists_what_there_is(made: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"'quen3' is no renderer .*did you mean qwen3 .*there are: auto, default, .*llama-3"
    ):
        Rendering(str(made["qwen"]), "quen3")
    with pytest.raises(ConfigError, match=r"'llama-3' does not fit the tokenizer in .*<\|begin_of_text\|>"):
        Rendering(str(made["qwen"]), "llama-3")


def test_asked_for_renderer_is_taken_and_a_contradiction_is_said(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = folder(made["qwen"], tmp_path, CHATML)
    assert Rendering(place, "qwen3").renderer == "qwen3"
    assert "renders differently: is this the format that the model speaks?" in caplog.text


def test_template_is_read_from_the_tokenizers_settings_with_its_special_tokens(
    made: dict[str, Path], tmp_path: Path
) -> None:
    about = {
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
            {"name": "tool_use", "template": "tools{{ messages[0].content }}"},
        ],
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|endoftext|>",
    }
    rendering = Rendering(folder(made["qwen"], tmp_path, tokenizer_config=about))
    token = rendering.tokenizer.convert_tokens_to_ids
    assert rendering.renderer == "default"
    assert rendering.render(ASKED) == [token("<|im_start|>"), token("q"), token("<|endoftext|>")]
    assert rendering.text(rendering.render(ASKED, [TOOL])) == "toolsq"


def test_played_template_ends_turns_as_it_and_the_models_files_say(made: dict[str, Path], tmp_path: Path) -> None:
    place = folder(made["qwen"], tmp_path, CHATML, generation_config={"eos_token_id": [0, 7]})
    rendering = Rendering(place)
    assert rendering.stop_ids == (rendering.tokenizer.convert_tokens_to_ids("<|im_end|>"), 0, 7)


def test_template_that_refuses_a_conversation_ends_the_rollout(made: dict[str, Path], tmp_path: Path) -> None:
    refusing = "{% if tools %}{{ raise_exception('No tools, please') }}{% endif %}" + CHATML
    rendering = Rendering(folder(made["qwen"], tmp_path, refusing))
    assert rendering.render(ASKED)
    with pytest.raises(TaskError, match="refuses the conversation: No tools, please"):
        rendering.render(ASKED, [TOOL])


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_template_is_played_in_a_sandbox(made: dict[str, Path], tmp_path: Path, source: str) -> None:
    place = folder(made["qwen"], tmp_path, source)
    with pytest.raises(TaskError, match="refuses the conversation"):
        Rendering(place).render(ASKED)


def test_broken_template_is_told_at_start(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the chat template in .* can't be read"):
        Rendering(folder(made["qwen"], tmp_path, "{% if %}"))


def test_what_hugging_face_gives_to_templates_is_there(made: dict[str, Path], tmp_path: Path) -> None:
    source = (
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{% for x in [1, 2] %}{% if x == 2 %}"
        "{% break %}{% endif %}{{ x }}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    rendering = Rendering(folder(made["qwen"], tmp_path, source))
    assert rendering.text(rendering.render([{"role": "user", "content": 'é"<b>'}])) == '"é\\"<b>"14'


DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n"  # noqa: RUF001
    '{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'  # noqa: RUF001
)


@pytest.mark.parametrize(
    ("mention", "said"),
    [
        (
            '<tool_call>{"name": 1, "arguments": 2}',
            '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
        ),
        (
            "<function=x>",
            "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        ),
        ("<arg_key>", "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"),
        (DEEPSEEK, DEEPSEEK),
        ("<|start_header_id|> parameters", '{"name": "bash", "parameters": {"command": "ls"}}'),
    ],
    ids=["json", "xml", "pairs", "deepseek", "llama"],
)
def test_calls_are_read_in_the_form_that_the_template_describes(tmp_path: Path, mention: str, said: str) -> None:
    plain = CHATML.partition("{%- for call")[0] + "{{- '<|im_end|>\\n' }}{%- endfor %}"
    template = f"{{% if tools %}}{{% raw %}}<tool_call> {mention}{{% endraw %}}{{% endif %}}" + plain
    if "tool▁" in mention or "header" in mention:
        template = template.replace("<tool_call> ", "")
    rendering = Rendering(folder(Path(formats.folder()), tmp_path, template))
    (call,) = rendering.parse(rendering.tokenizer.encode(said), [], [TOOL]).calls
    assert rendering.renderer == "default" and (call.name, call.arguments) == ("bash", {"command": "ls"})


def test_calls_in_no_known_form_are_not_read_and_the_log_says_so(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rendering = Rendering(folder(made["llama"], tmp_path, "{{ messages[0].content }}"))
    assert not rendering.parse(rendering.tokenizer.encode('<call>{"name": "bash"}</call>'), [], [TOOL]).calls
    assert "tool calls are NOT read" in caplog.text


def test_template_that_wants_arguments_as_text_gets_them_so(made: dict[str, Path], tmp_path: Path) -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments + '!' }}"
    rendering = Rendering(folder(made["qwen"], tmp_path, source))
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert rendering.text(rendering.render([*ASKED, said])) == '{"command": "ls"}!'


def test_every_known_name_can_be_asked_for() -> None:
    assert families.names()[:2] == ["auto", "default"] and "qwen3.5" in families.names()
