"""A chat template is a foreign program: whatever it does ends within bounds and holds up no other chat."""

import asyncio
import gc
import os
import signal
import time
from pathlib import Path

import pytest

from baton.process.errors import InvalidArgument, Unavailable
from baton.process.helper import Helper
from baton.router.model import chat_template
from baton.router.model.chat_template import ChatTemplate
from baton.router.model.defaults import ModelFolderError
from baton.router.model.served_model import load_tokenizer
from baton.router.model.template_process import TemplateRefused
from baton.router.types.request import ChatPrompt, Message
from tests.router.tokenizers_for_tests import write_model_folder

SHORT_S = 0.3  # of CPU time
GOOD = [Message("user", "good")]
BAD = [Message("user", "bad")]
ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each template has processes of its own, as a router's has."""
    monkeypatch.setattr(chat_template, "Helper", Helper)


def when_bad(source: str) -> str:
    return "{% if messages[0].content == 'bad' %}" + source + "{% endif %}[{{ messages[0].content }}]"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS, "CPU time"),
        ("{% for a in range(1000000000) %}{% endfor %}", "does not support such messages"),
        ("{% set x = 'a' %}{{ (x * 1500000000)|length }}", "1024 MiB"),
        ("{{ 'a' * 1500000000 }}", "1024 MiB"),
        ("{{ ('a'|string).center(2000000000)|length }}", "1024 MiB"),
        ("{% set n = 2000000000 %}{{ ('%' ~ n ~ 'd') % 1 }}", "1024 MiB"),
        ("{% set x = ['a'] %}{{ (x * 900000000)|join }}", "1024 MiB"),
        ("{% set n = 9 %}{{ 9 ** (9 ** (n ** 2)) }}", "CPU time|MiB|large"),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "does not support such messages"),
        (
            "{% set s = namespace(x='a') %}{% for a in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
            "MiB|CPU",
        ),
        ("{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "characters"),
        ("{{ 1 // 0 }}", "does not support such messages"),
        ("{{ messages[7].content.x }}", "does not support such messages"),
        ("{{ raise_exception('the author says no') }}", "the author says no"),
    ],
)
async def test_too_costly_template_is_rejected_and_the_next_chat_served(source: str, reason: str) -> None:
    template = ChatTemplate(when_bad(source), {}, cpu_s=SHORT_S)
    try:
        with pytest.raises(TemplateRefused, match=reason):
            await template.render(BAD, most_characters=1 << 22)
        assert await template.render(GOOD) == "[good]"
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 9 ** (9 ** 9) }}", "CPU time|MiB"),
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "nested too deeply"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_uncompilable_template_is_rejected_at_load_with_its_file(tmp_path: Path, source: str, reason: str) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(
        ModelFolderError, match=rf"{tmp_path}.*(template does not compile|template\.jinja): .*({reason})"
    ):
        load_tokenizer(tmp_path)


async def test_chat_with_an_endless_template_is_rejected_while_another_is_served(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(when_bad(ENDLESS))
    tokenizer = load_tokenizer(tmp_path)
    try:
        slow = asyncio.ensure_future(tokenizer.prompt_tokens(ChatPrompt(BAD)))
        for _ in range(3):
            assert await tokenizer.prompt_tokens(ChatPrompt(GOOD))
        assert not slow.done()
        with pytest.raises(InvalidArgument, match="chat template rejects them: it takes more than 2 s of CPU time"):
            await slow
    finally:
        tokenizer.close()


async def test_ending_that_depends_on_an_option_is_rendered_off_the_event_loop() -> None:
    source = "{% if mode == 'slow' %}" + ENDLESS + "{% endif %}{{ mode }}"
    template, beats = ChatTemplate(source, {}, cpu_s=SHORT_S), list[float]()

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0)

    beating = asyncio.ensure_future(beat())
    try:
        assert await template.ending({"mode": "slow"}, True) == ""
        assert await template.ending({"mode": "quick"}, True) == "quick"
        assert len(beats) > 100
    finally:
        beating.cancel()
        template.close()


async def test_starved_template_process_is_unavailable_and_the_next_chat_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    try:
        [pid] = [each.pid for each in template._helper.processes if each.pid is not None]
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(template._helper, "limit_s", 0.2)
            with pytest.raises(Unavailable):
                await template.render(GOOD)
        assert await template.render(GOOD) == "good"
    finally:
        template.close()


def test_dropped_template_leaves_no_process() -> None:
    template = ChatTemplate("{{ messages }}", {})
    [pid] = [each.pid for each in template._helper.processes if each.pid is not None]
    del template
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_template_over_the_memory_bound_leaves_its_process_to_the_next_chat() -> None:
    template = ChatTemplate(when_bad("{% set a = 'a' %}{{ a * 1500000000 }}"), {})
    try:
        [before] = [each.pid for each in template._helper.processes if each.pid is not None]
        with pytest.raises(TemplateRefused, match="1024 MiB"):
            await template.render(BAD)
        assert await template.render(GOOD) == "[good]"
        assert before in [each.pid for each in template._helper.processes]
    finally:
        template.close()
