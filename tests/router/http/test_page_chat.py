"""The chat box: examples, the system message, answers that fit, and asking again."""

import json
from typing import Any

import pytest

from baton.process.security.api_keys import ApiKey, KeyLimits, digest_of
from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.visits import ANSWER, count, text, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

EXAMPLE = "[...document.querySelectorAll('.example')].find((each) => each.textContent.includes({})).click()"


demo_model = pytest.mark.parametrize("model_name", ["tableqa"], indirect=True)


@demo_model
async def test_example_is_asked_with_its_table(page: Page, gateway: Gateway) -> None:
    gateway.says("is 34")
    await visit(page, gateway.port)
    await page.until(f"{count('.example')} >= 2")

    await page.evaluate(EXAMPLE.format(json.dumps("How old is Jane Doe?")))

    await page.until(f"{ANSWER}.includes('tokens')")
    assert await page.evaluate(count(".message.system td")) == 15
    assert await page.evaluate(count(".example")) == 0
    prompt = gateway.prompt()
    assert prompt.startswith("[system]You are a helpful assistant that reads tables. Here is a table.\n| ID |")
    assert prompt.endswith("| Engineer | Ghana |\n[user]How old is Jane Doe?[assistant]")


@demo_model
async def test_example_without_a_table_is_asked_alone_and_new_shows_all_again(page: Page, gateway: Gateway) -> None:
    gateway.says("maps")
    await visit(page, gateway.port)
    await page.until(f"{count('.example')} >= 2")
    await page.evaluate("document.getElementById('system').value = 'Be kind.'")

    await page.evaluate(EXAMPLE.format(json.dumps("What is a block table?")))

    await page.until(f"{ANSWER}.includes('tokens')")
    assert gateway.prompt() == "[user]What is a block table?[assistant]"
    await page.evaluate("document.getElementById('clear').click()")
    assert await page.evaluate(count(".example")) >= 2
    assert await page.evaluate(count(".message")) == 0


async def test_examples_of_another_model_ask_nothing_about_the_demo_table(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await page.until(f"{count('.example')} >= 2")
    assert "Jane Doe" not in await page.evaluate(text("#examples"))


async def test_reload_keeps_the_conversation_and_new_forgets_it(page: Page, gateway: Gateway) -> None:
    gateway.says("first")
    await visit(page, gateway.port)
    await page.evaluate("document.getElementById('system').value = 'Be kind.'")
    await page.type("#question", "One")
    await page.until(f"{ANSWER}.includes('tokens')")

    await visit(page, gateway.port)

    await page.until(f"{ANSWER}.includes('first')")
    gateway.says("second")
    await page.until("!document.getElementById('model').hidden")
    await page.type("#question", "Two")
    await page.until(f"{ANSWER}.includes('second')")
    assert gateway.prompt() == "[system]Be kind.[user]One[assistant]first[user]Two[assistant]"
    await page.evaluate("document.getElementById('clear').click()")
    await visit(page, gateway.port)
    assert await page.evaluate(count(".message")) == 0


async def test_regenerate_asks_the_last_question_again_in_its_place(page: Page, gateway: Gateway) -> None:
    gateway.says("first")
    await visit(page, gateway.port)
    await page.type("#question", "One")
    await page.until(count(".again"))
    gateway.says("second")

    await page.evaluate("document.querySelector('.again').click()")

    await page.until(f"{ANSWER}.includes('second')")
    assert gateway.prompt() == "[user]One[assistant]"
    assert await page.evaluate(count(".message")) == 2


async def test_copy_puts_the_answer_as_the_model_wrote_it_into_the_clipboard(page: Page, gateway: Gateway) -> None:
    gateway.says("**bold** answer")
    await visit(page, gateway.port)
    await page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    await page.type("#question", "One")
    await page.until(count(".copy"))

    await page.evaluate("document.querySelector('.copy').click()")

    await page.until(f"{text('.copy')} === 'Copied'")
    assert await page.evaluate("window.copied") == "**bold** answer"


async def test_token_limit_is_reduced_to_the_context(page: Page, gateway: Gateway) -> None:
    gateway.says("hello")
    await visit(page, gateway.port)
    await page.evaluate("document.getElementById('max-tokens').value = '99999999'")

    await page.type("#question", "Hi")

    await page.until(f"{ANSWER}.includes('hello')")
    prompt_tokens = len("[user]Hi[assistant]")
    room = 1024 - prompt_tokens
    note = f"at most {room} tokens, not 99999999: the prompt takes {prompt_tokens} of 1024"
    await page.until(f"{ANSWER}.includes({json.dumps(note)})")
    commands = [each.prefill for each in gateway.pair.prefill.commands if each.WhichOneof("command") == "prefill"]
    assert commands[-1].sampling.max_tokens == room


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Any) -> dict[str, Any]:
    if "key" not in request.node.name:
        return {}
    key = ApiKey("short", digest_of("baton-short"), limits=KeyLimits(max_context_tokens=64))
    (tmp_path / "keys").write_text(key.line + "\n")
    return {"api_keys": tmp_path / "keys"}


async def test_limit_of_a_key_must_fit(page: Page, gateway: Gateway) -> None:
    gateway.says("hello")
    await visit(page, gateway.port)
    await page.until("!document.getElementById('keys').hidden")
    await page.type("#key", "baton-short")
    await page.until("!document.getElementById('model').hidden")  # with the first state that knows one

    await page.type("#question", "Hi")

    await page.until(f"{ANSWER}.includes('at most {64 - len('[user]Hi[assistant]')} tokens, not 256')")


async def test_too_long_conversation_is_reported_and_keeps_the_question(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)

    await page.type("#question", "x" * 1100)

    await page.until(count(".retry"))
    expected = f"The conversation is too long for tiny: {1100 + len('[user][assistant]')} tokens, and at most 1023 fit."
    assert (await page.evaluate(ANSWER)).startswith(expected)
    assert len(await page.evaluate("document.getElementById('question').value")) == 1100


async def test_answer_that_was_stopped_can_be_asked_again_in_its_place(page: Page, gateway: Gateway) -> None:
    gateway.says("first")
    await visit(page, gateway.port)
    await page.type("#question", "One")
    await page.until(f"{ANSWER}.includes('first') && {ANSWER}.includes('tokens')")  # it has ended: another may be asked
    gateway.pair.manual = True
    await page.type("#question", "Two")
    await gateway.pair.prefill.received("prefill", 2)
    await page.evaluate("document.getElementById('stop').click()")
    await page.until(count(".retry"))
    gateway.pair.manual = False
    gateway.says("second")

    await page.evaluate("document.querySelector('.retry').click()")

    await page.until(f"{ANSWER}.includes('second')")
    assert gateway.prompt() == "[user]One[assistant]first[user]Two[assistant]"
    assert await page.evaluate(count(".message.user")) == 2
    assert await page.evaluate("document.getElementById('question').value") == ""


async def test_answer_that_ends_at_its_limit_says_so(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await page.evaluate("document.getElementById('max-tokens').value = '4'")

    await page.type("#question", "Hello?")

    await page.until(f"{ANSWER}.includes('4 tokens') && {ANSWER}.includes('stopped at max_tokens')")


async def test_without_a_model_the_page_says_so_and_keeps_the_question(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await page.evaluate(
        "import('/page/chat.js').then(({ startChat }) => { startChat(() => null); })"  # as before the first model
    )

    await page.type("#question", "Hello?")

    await page.until(f"{text('#ask-problem')} === 'No model is ready yet.'")
    assert await page.evaluate("document.getElementById('question').value") == "Hello?"


async def test_thoughts_are_folded_next_to_the_answer(page: Page, gateway: Gateway) -> None:
    await gateway.thinks("Hm, maps.</think>Maps.", template="{{ messages[-1].content }}<think>")
    await visit(page, gateway.port)

    await page.type("#question", "Hi")

    await page.until(f"{ANSWER}.includes('tokens')")
    assert await page.evaluate(text(".thoughts p")) == "Hm, maps."
    assert not await page.evaluate("document.querySelector('.thoughts').open")
    assert await page.evaluate(text(".assistant .markdown")) == "Maps."
