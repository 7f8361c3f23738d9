"""How the page looks: wide and narrow, light and dark, with all that it can show at once."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.visits import ANSWER, count, pretend, request, stall, state, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

CONTRAST = (Path(__file__).parents[2] / "fixtures" / "contrast.js").read_text().split("\n", 1)[1].strip()
LEAST = 4.5  # WCAG 2.2, AA
SAID = (
    f"# Title\n\nA [link](https://a.b), `code`, **bold**.\n\n> {'long' * 60}\n\n"
    f"```\n{'wide ' * 60}\n```\n\n| a | b |\n|---|---|\n| {'cell ' * 40} | c |\n"
)
OVERFLOWING = """
  [...document.querySelectorAll('body *')]
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .filter((each) => !each.closest('pre, .scrolls, .bar, svg')) // which scroll, or are cut
    .map((each) => each.outerHTML.slice(0, 99))
""".strip()
SCROLLS_SIDEWAYS = """
  [document.documentElement, document.getElementById('log')]
    .filter((each) => each.scrollWidth !== each.clientWidth)
    .map((each) => [each.localName, each.scrollWidth, each.clientWidth])
""".strip()


async def fill(page: Page, gateway: Gateway) -> None:
    """The page with an answer, one that failed, requests of all outcomes, all of them open."""
    gateway.says(SAID)
    await visit(page, gateway.port)
    await page.evaluate("document.getElementById('system').value = 'Be *kind*.'")
    await page.evaluate("document.getElementById('system-box').open = true")
    await page.evaluate("document.getElementById('max-tokens').value = '900'")
    await page.type("#question", "Hello?")
    await page.until(f"{ANSWER}.includes('tokens')")
    await page.type("#question", "x" * 2000)
    await page.until(count(".retry"))
    requests = [
        request(1, request_id="w" * 128, model="m" * 200, stages={"prefill_ms": 9000.0, "total_ms": 123456.0}),
        request(2, status="CANCELLED", reason="the client left", completion_tokens=None, attempts=3, cached_tokens=64),
        request(3, status="INVALID_ARGUMENT", reason="max_tokens: " + "wordy " * 40, decode="", prompt_tokens=None),
        request(4, status="UNAVAILABLE", reason="WORKER_LOST:" + "x" * 300, stages={"ttft_ms": 0.0}),
        request(
            5,
            stages={"total_ms": 4000.0},
            tbt={"p50_ms": 9.9, "p99_ms": 12.3, "max_ms": 412.0},
            stall_count=9,
            stalls=[
                stall(1500.0, 412.0, {"cause": "prompt_tokens", "culprit": "w" * 128, "detail": "1024 tokens"}),
                stall(3999.0, 90.0, {"cause": "preemption", "by_another": True}),
            ],
        ),
        *(request(number) for number in range(6, 9)),
    ]
    await pretend(page, state(requests=requests, detail="degraded: one prefill worker is lost"))
    await page.until(f"{count('.request')} === 8")
    await page.evaluate("document.querySelectorAll('.request').forEach((each) => { each.open = true; })")
    await page.evaluate("document.getElementById('keys').hidden = false")
    await page.evaluate("document.getElementById('key-problem').textContent = 'the API key is not known'")


async def faults(page: Page) -> dict[str, Any]:
    """What is unreadable or too wide, by width and colours."""
    found: dict[str, Any] = {}
    for width, dark in itertools.product((320, 360, 768, 1320), (False, True)):
        await page.shape(width, 900, mobile=width < 768, dark=dark)
        for fault in (f"({CONTRAST})({LEAST})", SCROLLS_SIDEWAYS, OVERFLOWING):
            if told := await page.evaluate(fault):
                found[f"{width} {'dark' if dark else 'light'} {fault[:40]}"] = told
    return found


async def test_texts_are_readable_and_nothing_is_wider_than_the_screen(page: Page, gateway: Gateway) -> None:
    await page.shape(320, 900, mobile=True)
    await fill(page, gateway)
    assert await faults(page) == {}

    await page.evaluate("window.fetch = () => Promise.reject(new TypeError('gone'))")
    await page.until("document.body.classList.contains('stale')")
    assert await faults(page) == {}


async def test_controls_have_names_and_can_be_reached_by_keyboard(page: Page, gateway: Gateway) -> None:
    await fill(page, gateway)
    nameless = """
      [...document.querySelectorAll('button, input, select, textarea, a, [tabindex], [role=img]')]
        .filter((each) => each.checkVisibility())
        .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.labels?.[0]?.textContent.trim()))
        .map((each) => each.outerHTML.slice(0, 99))
    """.strip()

    assert await page.evaluate(nameless) == []
    unreachable = "[...document.querySelectorAll('.request summary, .retry')].filter((each) => each.tabIndex < 0)"
    assert await page.evaluate(f"{unreachable}.length") == 0
