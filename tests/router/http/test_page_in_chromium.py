"""The page as a browser shows it: headless Chromium, a real gateway, scripted workers."""

from typing import Any

import pytest

from baton.process.security.api_keys import digest_of
from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.visits import ANSWER, fact, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

HOSTILE = "<img src=x onerror=alert(1)><b>bold</b> & <script>alert(2)</script>"
HASHES = ",".join(f"{name}:{digest_of(f'baton-{name}').hex()}" for name in ("user", "boss"))


async def test_question_is_answered_in_a_stream_and_workers_are_updated(page: Page, gateway: Gateway) -> None:
    gateway.pair.manual = True
    await visit(page, gateway.port)
    await page.until(f"{fact('decode-0', 'queue')} === '0'")

    await page.type("#question", "Hello?")
    attempt_id = (await gateway.pair.prefill.received("prefill")).attempt_id
    gateway.pair.first_step(attempt_id, [72])
    gateway.pair.landed(attempt_id)
    await page.until(f"{ANSWER}.length === 1")
    gateway.pair.decode.report.running_sequences = 1
    gateway.pair.decode.report.waiting_requests = 5
    await page.until(f"{fact('decode-0', 'queue')} === '5' && {fact('decode-0', 'batch')}.startsWith('1 /')")
    assert not await page.evaluate("document.getElementById('stop').hidden"), "an answer that streams can be stopped"
    gateway.pair.step(attempt_id, 1, [73, 74], end=2)
    await page.until(f"{ANSWER}.includes('3 tokens')")

    await page.until("document.querySelectorAll('.request .bar span').length > 1")
    assert page.problems == []
    assert all(url.startswith(f"http://127.0.0.1:{gateway.port}/") for url in page.fetched)


async def test_answers_are_text_on_a_phone_too(page: Page, gateway: Gateway) -> None:
    gateway.says(HOSTILE)
    await page.shape(360, 740, mobile=True, dark=True)
    await visit(page, gateway.port)

    await page.type("#question", HOSTILE + "w" * 300)
    await page.until(f"{ANSWER}.includes('tokens/s') || {ANSWER}.includes('first after')")

    assert HOSTILE in await page.evaluate(ANSWER)
    assert await page.evaluate("document.querySelectorAll('main img, main b:not(.worker b), main script').length") == 0
    await page.until("document.querySelectorAll('.request').length > 0")
    assert await page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.problems == []


@pytest.mark.parametrize("settings", [{"api_key_hashes": HASHES}], indirect=True)
async def test_key_is_asked_for_and_kept_in_memory_only(page: Page, gateway: Gateway, settings: Any) -> None:
    gateway.says("hello")
    await visit(page, gateway.port)
    await page.until("!document.getElementById('keys').hidden")
    await page.type("#key", "baton-wrong")
    await page.until("document.getElementById('key-problem').textContent.includes('unknown')")

    await page.type("#key", "baton-user")
    await page.until("!document.getElementById('model').hidden")
    await page.type("#question", "Hi")
    await page.until(f"{ANSWER}.includes('hello')")

    await page.until("document.querySelectorAll('.request').length === 1")
    assert "administrator" in await page.evaluate("document.getElementById('workers').textContent")
    stored = "[localStorage.length, document.cookie.length, location.search.length]"
    assert await page.evaluate(stored) == [0, 0, 0]
    assert "baton-user" not in await page.evaluate("JSON.stringify({...sessionStorage})")
    assert "baton-user" not in await page.evaluate("document.documentElement.outerHTML")
    assert all("401" in problem and "/page/state" in problem for problem in page.problems), page.problems
