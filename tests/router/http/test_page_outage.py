"""The page while its server is gone, hangs or comes back."""

import re

import pytest

from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.relay import relayed
from tests.fixtures.visits import ANSWER, count, fact, pretend, request, state, text, visit
from tests.router.http.conftest import Gateway
from tests.router.tokenizers_for_tests import byte_level

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

STALE = "document.body.classList.contains('stale')"
SHOWN = "!document.getElementById('outage').hidden"
RETRY = "document.querySelector('.retry').click()"
BOX = "document.getElementById('question').value"


async def begin_answer(page: Page, gateway: Gateway) -> int:
    """Returns the attempt, whose first token is shown."""
    gateway.pair.manual = True
    await page.type("#question", "Hello?")
    attempt_id: int = (await gateway.pair.prefill.received("prefill")).attempt_id
    gateway.pair.first_step(attempt_id, byte_level().encode("H").ids)
    gateway.pair.landed(attempt_id)
    await page.until(f"{ANSWER} === 'H'")
    return attempt_id


async def test_figures_turn_grey_during_an_outage_and_return_after_it(page: Page, gateway: Gateway) -> None:
    async with relayed(gateway.port) as relay:
        await visit(page, relay.port)
        await page.until(f"{fact('decode-0', 'queue')} === '0'")
        assert await page.evaluate(text(".worker .connected")) == "connected"

        relay.cut()
        await page.until(f"{SHOWN} && {STALE}")

        notice = await page.evaluate(text("#outage"))
        assert re.match(r"Server not reachable since \d\d:\d\d:\d\d, retrying", notice)
        assert await page.evaluate(f"{count('.worker .connected')} + {count('header .connected')}") == 0
        assert await page.evaluate("getComputedStyle(document.querySelector('.side')).filter") == "grayscale(1)"
        await page.until("performance.getEntriesByName(location.href + 'page/state').length > 3")
        assert await page.evaluate(text("#outage")) == notice, "the time is that of the first look that failed"

        await relay.start()
        await page.until(f"!{SHOWN} && !{STALE} && {count('.worker .connected')} === 2")


async def test_interrupted_answer_keeps_its_text_and_can_be_asked_again(page: Page, gateway: Gateway) -> None:
    async with relayed(gateway.port) as relay:
        await visit(page, relay.port)
        await begin_answer(page, gateway)
        await page.evaluate("document.getElementById('question').value = 'a draft'")

        relay.cut()
        await page.until(count(".retry"))

        assert (await page.evaluate(ANSWER)).startswith("H")
        assert await page.evaluate(text(".message.assistant .problem")) == "The server is not reachable. Retry"
        await relay.start()
        gateway.pair.manual = False
        gateway.says("Hello again")
        await page.until(f"!{SHOWN}")
        await page.evaluate(RETRY)
        await page.until(f"{ANSWER}.startsWith('Hello again') && {ANSWER}.includes('tokens')")
        assert await page.evaluate(count(".message")) == 2
        assert await page.evaluate(BOX) == "a draft"


async def test_hanging_server_is_noticed_and_its_answer_abandoned(page: Page, gateway: Gateway) -> None:
    async with relayed(gateway.port) as relay:
        await visit(page, relay.port)
        await begin_answer(page, gateway)

        relay.freeze()

        await page.until(f"{SHOWN} && {STALE}")
        await page.until(count(".retry"))
        assert "not reachable" in await page.evaluate(ANSWER)


async def test_question_stays_in_its_box_until_the_server_has_accepted_it(page: Page, gateway: Gateway) -> None:
    gateway.says("hello")
    async with relayed(gateway.port) as relay:
        await visit(page, relay.port)
        relay.cut()
        await page.type("#question", "Are you there?")
        await page.until(count(".retry"))
        assert await page.evaluate(BOX) == "Are you there?"
        assert not await page.evaluate("document.getElementById('question').readOnly")

        await relay.start()
        await page.until(f"!{SHOWN}")
        await page.evaluate("document.getElementById('ask').requestSubmit()")

        await page.until(f"{ANSWER}.includes('hello')")
        assert await page.evaluate(BOX) == ""
        assert await page.evaluate(count(".message")) == 2, "the question that failed was replaced"


async def test_while_a_question_waits_its_box_is_read_only_and_stop_gives_it_back(page: Page, gateway: Gateway) -> None:
    gateway.pair.manual = True
    await visit(page, gateway.port)
    await page.type("#question", "Hello?")
    await gateway.pair.prefill.received("prefill")
    assert await page.evaluate(f"document.getElementById('question').readOnly && {BOX} === 'Hello?'")

    await page.evaluate("document.getElementById('stop').click()")

    await page.until(f"{ANSWER}.startsWith('stopped') && !document.getElementById('question').readOnly")
    assert await page.evaluate(BOX) == "Hello?"


async def test_error_of_the_server_is_shown_unchanged(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    refusal = "new Response(JSON.stringify({ error: { message: 'no idea' } }), { status: 503 })"
    await page.evaluate(f"window.fetch = () => Promise.resolve({refusal})")

    await page.until(SHOWN)

    assert (await page.evaluate(text("#outage"))).startswith("Server answers with an error (no idea) since ")


async def test_requests_of_a_restarted_server_replace_those_with_equal_numbers(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await pretend(page, state(requests=[request(1, request_id="before")]))
    await page.until("document.querySelector('[data-request=before]') !== null")

    await pretend(page, state(instance="two", requests=[request(1, request_id="after")]))

    await page.until("document.querySelector('[data-request=after]') !== null")
