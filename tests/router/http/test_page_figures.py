"""The list of requests and the workers on the page: failures, the scale, tooltips."""

import pytest

from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.session_client import eventually
from tests.fixtures.visits import count, hover, press, pretend, request, state, text, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

TIP = "(document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent)"


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
    assert await page.evaluate(text(f"{older} .why")) == "the client left before the first token"
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
    await hover(page, "[data-request=r99] summary")
    await page.until(f"{TIP}.includes('longer than the scale') && {TIP}.includes('60000.00 ms')")


async def test_bars_of_like_requests_keep_their_proportions(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await pretend(page, state(requests=[took(1, 10.0), took(2, 20.0), took(3, 25.0)]))
    await page.until(f"{count('.request')} === 3")

    assert await page.evaluate(count(".bar.cut")) == 0
    assert await page.evaluate(width(1)) == pytest.approx(0.4, abs=0.02)
    assert await page.evaluate(width(3)) == pytest.approx(1.0, abs=0.02)
    assert (await page.evaluate(text("#scale-end"))) == "end at 25 ms"


async def test_tooltips_have_exact_figures_for_the_pointer_and_the_keyboard(page: Page, gateway: Gateway) -> None:
    await visit(page, gateway.port)
    await pretend(page, state(requests=[took(1, 12.3456)]))
    await page.until("document.querySelector('[data-request=r1]') !== null")

    await hover(page, "[data-request=r1] .track")
    await page.until(f"{TIP}.includes('prefill: 12.35 ms')")
    await hover(page, "[data-worker=decode-0] b")
    await page.until(f"{TIP}.includes('pending: 1234 prompt tokens') && {TIP}.includes('p99 67.89 ms')")
    await hover(page, "[data-worker=decode-0] [role=img]")
    await page.until(f"{TIP}.includes('4096 blocks') && {TIP}.includes('6 in transfer')")
    await press(page, "Escape", 27)
    assert await page.evaluate(TIP) == ""

    await page.evaluate("document.getElementById('send').focus()")
    seen = []
    for _ in range(7):
        await press(page, "Tab", 9)
        seen.append(await page.evaluate(TIP))
    assert "127.0.0.1:1, lost" in seen[0]
    assert "not known" in seen[1]
    assert "127.0.0.1:2, connected" in seen[2]
    assert "4096 blocks" in seen[3]
    assert seen[4] == "", "the scale"
    assert "TTFT 12.35 ms" in seen[5]
    described = "document.activeElement.getAttribute('aria-describedby')"
    assert await page.evaluate(described) is None, "behind the last of them"
    await page.until(f"{TIP} === ''")


async def test_the_tooltip_of_the_focus_stays_where_the_page_scrolls_under_the_pointer(
    page: Page, gateway: Gateway
) -> None:
    await visit(page, gateway.port)
    await pretend(page, state(requests=[took(number, number) for number in range(1, 25)]))
    await page.until(f"{count('.request')} === 24")
    await hover(page, "[data-request=r1] summary")
    await page.until(f"{TIP}.includes('TTFT 1.00 ms')")
    await press(page, "Shift", 16)  # from now on it is the keyboard that moves the focus
    await page.evaluate("document.querySelector('[data-request=r12] summary').focus({ preventScroll: true })")
    await page.until(f"{TIP}.includes('TTFT 12.00 ms')")

    await page.evaluate("document.addEventListener('pointerover', () => { window.over = true; })")
    await page.evaluate("scrollBy(0, 100)")
    await page.until("window.over")

    assert "TTFT 12.00 ms" in await page.evaluate(TIP)


async def test_a_tooltip_is_renewed_with_its_figures_and_stays_on_the_screen(page: Page, gateway: Gateway) -> None:
    await page.shape(360, 740, mobile=True)
    await visit(page, gateway.port)
    await pretend(page, state())
    await page.until("document.querySelector('[data-request=r1]') !== null")
    await hover(page, "[data-worker=decode-0] b")
    await page.until(f"{TIP}.includes('queue: 2 ')")
    later = state()
    later["cluster"]["workers"][1]["load"]["queue"] = 7

    await pretend(page, later)

    await page.until(f"{TIP}.includes('queue: 7 ')")
    edges = (
        "(() => { const at = document.getElementById('tip').getBoundingClientRect(); return [at.left, at.right]; })()"
    )
    left, right = await page.evaluate(edges)
    assert left >= 0
    assert right <= 360
