"""The list of requests and the workers on the page: failures, the scale, titles."""

import pytest

from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.session_client import eventually
from tests.fixtures.visits import count, pretend, request, state, text, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")


def width(number: int) -> str:
    """Of the coloured part of a bar, as a share of the whole."""
    bar = f"document.querySelector('[data-request=r{number}] .bar')"
    parts = f"[...{bar}.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)"
    return f"{parts} / {bar}.getBoundingClientRect().width"


def took(number: int, prefill_ms: float) -> dict[str, object]:
    times = {"prefill_ms": prefill_ms, "ttft_ms": prefill_ms, "total_ms": prefill_ms + 5}
    return request(number, stages=times)


async def test_cancelled_and_failed_requests_are_listed_with_their_reasons(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    async with gateway.held("/v1/completions", prompt="abc", max_tokens=9):
        pass
    await eventually(lambda: gateway.process.dispatcher.active == 0)
    gateway.pair.manual = False
    refused = await gateway.refused("/v1/completions", prompt="abc", max_tokens=5000)

    await page.until(f"{count('.request')} === 2")

    newest, older = ".request:nth-child(1)", ".request:nth-child(2)"
    assert await page.evaluate(text(f"{newest} .pill")) == "refused"
    assert await page.evaluate(text(f"{newest} .why")) == refused["message"]
    assert await page.evaluate(text(f"{older} .pill")) == "cancelled"
    assert await page.evaluate(text(f"{older} .why")) == "client disconnected before the first token"
    assert "3 + 0 tokens" in await page.evaluate(text(f"{older} .what"))
    assert "no token" in await page.evaluate(text(f"{older} .total"))
    assert await page.evaluate(count(f"{older} .bar .stage-unfinished")) == 1
    assert page.problems == []


@pytest.mark.parametrize("usual", [1, 2, 23])
async def test_one_outlier_is_cut_and_does_not_spoil_the_scale(page: Page, gateway: Gateway, usual: int) -> None:
    await visit(page, gateway.port)
    requests = [took(number, 10.0 + number % 3) for number in range(1, usual + 1)]
    await pretend(page, state(requests=[took(99, 60_000.0), *requests]))
    await page.until(f"{count('.request')} === {usual + 1}")

    for number in range(1, usual + 1):
        assert await page.evaluate(width(number)) > 0.25, number
    assert await page.evaluate(count(".bar.cut")) == 1
    assert await page.evaluate(width(99)) == pytest.approx(1.0, abs=0.02)
    assert await page.evaluate("getComputedStyle(document.querySelector('.bar.cut'), '::after').content") == '""'
    assert await page.evaluate("document.querySelector('.bar.cut').title") == "longer than the scale: 60.0 s"


async def test_bars_of_like_requests_keep_their_proportions(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await pretend(page, state(requests=[took(1, 10.0), took(2, 20.0), took(3, 25.0)]))
    await page.until(f"{count('.request')} === 3")

    assert await page.evaluate(count(".bar.cut")) == 0
    assert await page.evaluate(width(1)) == pytest.approx(0.4, abs=0.02)
    assert await page.evaluate(width(3)) == pytest.approx(1.0, abs=0.02)
    assert (await page.evaluate(text("#scale-end"))) == "end at 25 ms"


async def test_worker_title_has_the_figures_that_its_card_leaves_out(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await pretend(page, state())
    title = "(document.querySelector('[data-worker=decode-0]')?.title ?? '')"
    await page.until(f"{title}.includes('decode worker at 127.0.0.1:2')")
    assert "100 of 400 prompt tokens hit\n1 preemptions, 77777 steps, 4096 blocks" in await page.evaluate(title)

    later = state()
    later["cluster"]["workers"][1]["load"]["steps"] = 77778
    await pretend(page, later)
    await page.until(f"{title}.includes('77778 steps')")
