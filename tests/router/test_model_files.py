"""What the router reads of a checkpoint: defaults, chat template, tokenizer; without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding
from transformers.utils.chat_template_utils import render_jinja_template

from baton.process.errors import InvalidArgument
from baton.router.model.chat_template import ChatTemplate, UnreadOption, chat_template_of
from baton.router.model.defaults import GenerationDefaults, ModelFolderError, read_family, read_generation_defaults
from baton.router.model.prompt_reader import TextTooLong
from baton.router.model.served_model import load_tokenizer
from baton.router.model.template_process import TemplateRefused
from baton.router.types.request import ChatPrompt, Message, TextPrompt, TokenPrompt
from baton.text.tokenizer.checkpoint_tokenizer import read_tokenizer
from tests.router.tokenizers_for_tests import TEMPLATE, rendered, write_model_folder

CONVERSATION = (Message("user", "<hi> é"), Message("assistant", "yes"), Message("user", "more"))


def write(folder: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_without_a_generation_config_sampling_is_greedy(tmp_path: Path) -> None:
    assert read_generation_defaults(write(tmp_path, None, {"eos_token_id": 2})) == GenerationDefaults(
        eos_token_ids=frozenset({2})
    )


def test_sampling_values_do_not_count_without_do_sample(tmp_path: Path) -> None:
    defaults = read_generation_defaults(write(tmp_path, {"temperature": 0.7, "top_k": 5, "eos_token_id": [1, 2]}))
    assert defaults == GenerationDefaults(eos_token_ids=frozenset({1, 2}))


def test_sampling_values_count_with_do_sample(tmp_path: Path) -> None:
    defaults = read_generation_defaults(write(tmp_path, {"do_sample": True, "top_p": 0.8, "top_k": 20}))
    assert defaults == GenerationDefaults(temperature=1.0, top_k=20, top_p=0.8)


def test_typical_p_counts_with_do_sample(tmp_path: Path) -> None:
    assert read_generation_defaults(write(tmp_path, {"do_sample": True, "typical_p": 0.5})).typical_p == 0.5


@pytest.mark.parametrize("do_sample", [False, True])
def test_repetition_penalty_counts_for_greedy_decoding_too(tmp_path: Path, do_sample: bool) -> None:
    defaults = read_generation_defaults(write(tmp_path, {"do_sample": do_sample, "repetition_penalty": 1.25}))
    assert defaults.repetition_penalty == 1.25


@pytest.mark.parametrize(
    "generation", [{"eos_token_id": "x"}, {"do_sample": True, "top_p": "x"}, {"repetition_penalty": 0}]
)
def test_broken_generation_config_is_named(tmp_path: Path, generation: dict[str, Any]) -> None:
    with pytest.raises(ModelFolderError):
        read_generation_defaults(write(tmp_path, generation))


@pytest.mark.parametrize(("config", "family"), [({"model_type": "qwen3"}, "qwen3"), ({}, ""), ({"model_type": 3}, "")])
def test_family_is_read_from_the_configuration(tmp_path: Path, config: dict[str, Any], family: str) -> None:
    assert read_family(write(tmp_path, None, config)) == family


def test_without_a_configuration_the_family_is_not_known(tmp_path: Path) -> None:
    assert read_family(tmp_path) == ""


def test_templates_render_like_transformers() -> None:
    source = (
        "{%- for m in messages %}\n  {% if loop.index > 9 %}{% break %}{% endif %}\n"
        "[{{ m['role'] }}] {{ m | tojson }}\n"
        "  {% generation %}{{ m['content'] }}{% endgeneration %}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    conversation = [{"role": message.role, "content": message.content} for message in CONVERSATION]
    theirs: Any = render_jinja_template(
        conversations=[conversation], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )
    assert rendered(ChatTemplate(source, {"eos_token": "</s>"}), CONVERSATION) == theirs[0][0]


def test_thoughts_and_dates_of_a_template_equal_transformers() -> None:
    source = (
        "{{ strftime_now('%Y-%m-%d') }} {{ reasoning_effort }} {% for message in messages %}"
        "{{ message.thinking or '-' }} {% endfor %}"
    )
    thoughts = (Message("user", "hi"), Message("assistant", "ho", reasoning="I may sing."))
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "thinking": "I may sing."},
    ]
    theirs: Any = render_jinja_template(conversations=[conversation], chat_template=source, reasoning_effort="low")
    assert rendered(ChatTemplate(source, {}), thoughts, options={"reasoning_effort": "low"}) == theirs[0][0]


def test_template_may_refuse_messages_but_reach_nothing(tmp_path: Path) -> None:
    template = chat_template_of(read_tokenizer(write_model_folder(tmp_path)))
    assert template is not None
    with pytest.raises(TemplateRefused, match="no such role"):
        rendered(template, (Message("bad", "x"),))
    with pytest.raises(TemplateRefused):
        rendered(ChatTemplate("{{ messages.__class__.__mro__ }}", {}), CONVERSATION)


def test_option_that_a_template_does_not_read_is_refused() -> None:
    source = "{% set style = style if style is defined else 'plain' %}{{ style }}{{ eos_token }}{{ messages|length }}"
    template = ChatTemplate(source, {"eos_token": "</s>"})

    assert template.variables == {"style", "eos_token", "messages"}
    assert rendered(template, CONVERSATION, options={"style": "odd"}).startswith("odd</s>")
    for name in ("stile", "eos_token", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(UnreadOption, match=name):
            rendered(template, CONVERSATION, options={"style": "odd", name: "x"})


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    template = chat_template_of(read_tokenizer(tmp_path))
    assert template is not None and rendered(template, CONVERSATION) == "file"


def test_template_named_tool_use_is_rendered_for_requests_with_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools|length }} tools"}, {"name": "default", "template": TEMPLATE}]
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = chat_template_of(read_tokenizer(tmp_path))
    assert template is not None and rendered(template, (Message("user", "hi"),)) == "[user]hi[assistant]"
    assert rendered(template, (Message("user", "hi"),), [{"type": "function"}]) == "1 tools"


def test_checkpoint_without_default_template_refuses_chats_without_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools|length }} tools"}, {"name": "rag", "template": "x"}]
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = chat_template_of(read_tokenizer(tmp_path))
    assert template is not None and rendered(template, (Message("user", "hi"),), [{}]) == "1 tools"
    with pytest.raises(TemplateRefused, match="no chat template named default, but rag, tool_use"):
        rendered(template, (Message("user", "hi"),))


async def test_every_kind_of_prompt_is_tokenised(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    assert await tokenizer.prompt_tokens(TokenPrompt([1, 2])) == (1, 2)
    text = await tokenizer.prompt_tokens(TextPrompt("hi"))
    assert await tokenizer.decode(text, skip_special_tokens=True) == "hi"
    chat = await tokenizer.prompt_tokens(ChatPrompt((Message("user", "hi"),)))
    assert await tokenizer.decode(chat, skip_special_tokens=False) == "[user]hi<|end|>[assistant]"
    tokenizer.close()


async def test_text_far_too_long_is_known_by_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    encoded: list[int] = []
    encode = tokenizer.reader._encode

    def noted(text: str, add_special_tokens: bool) -> Encoding:
        encoded.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer.reader, "_encode", noted)

    for prompt in (TextPrompt("x" * 1_000_000), ChatPrompt((Message("user", "x" * 1_000_000),))):
        with pytest.raises(TextTooLong) as refused:
            await tokenizer.prompt_tokens(prompt, most_tokens=20_000)
        assert refused.value.least_tokens > 20_000
    assert sum(encoded) < 100_000
    tokenizer.close()


async def test_text_a_little_too_long_is_counted_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    with pytest.raises(TextTooLong, match=r"^100 tokens$"):
        await tokenizer.prompt_tokens(TextPrompt("x" * 100), most_tokens=20)
    assert len(await tokenizer.prompt_tokens(TextPrompt("x" * 20), most_tokens=20)) == 20
    tokenizer.close()


async def test_model_without_a_template_refuses_to_chat(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidArgument, match="no chat template"):
        await tokenizer.prompt_tokens(ChatPrompt(CONVERSATION))
    tokenizer.close()


def test_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)


def test_router_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, baton.router.__main__, baton.router.process; from pathlib import Path;"
        "from baton.router.model.served_model import *;"
        f"load_tokenizer(Path({str(write_model_folder(tmp_path))!r}));"
        "sys.exit([name for name in ('torch', 'transformers', 'baton.engine') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_how_prompts_end_is_known_by_options() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}[a]{{ mood }}{% endif %}", {})
    assert await template.ending({"mood": "<think>"}, True) == "?[a]<think>"
    assert await template.ending({"mood": ""}, True) == "?[a]"
    assert await template.ending({}, False) == "?"
    assert await template.ending({"unread": 1}, True) == ""
