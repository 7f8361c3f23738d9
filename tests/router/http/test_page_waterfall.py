"""A request that is opened on the page: its stages in their places, its stalls with causes and culprits."""

from typing import Any

import pytest

from tests.fixtures.chromium import Page, find_chromium
from tests.fixtures.visits import count, pretend, request, stall, state, text, visit
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

OPENED = ".request[open] .waterfall"
STAGES = {
    "router_queue_ms": 100.0, "prefill_ms": 300.0, "ttft_ms": 400.0, "transfer_exposed_ms": 50.0, "first_step_ms": 50.0,
    "token_gap_ms": 100.0, "total_ms": 1000.0,
}  # fmt: skip


async def opened(page: Page, gateway: Gateway, **fields: Any) -> None:
    """A page with one request, which was opened."""
    await visit(page, gateway.port)
    await pretend(page, state(requests=[request(1, **fields)]))
    await page.until(f"{count('[data-request=r1]')} === 1")
    await page.evaluate("document.querySelector('[data-request=r1] summary').click()")
    await page.until(f"{count(OPENED)} === 1")


def place(stage: str, row: int) -> str:
    """[left, width] of a part, as shares of its lane."""
    part = f"document.querySelectorAll('{OPENED} .lane')[{row}].querySelector('.{stage}').getBoundingClientRect()"
    lane = f"document.querySelectorAll('{OPENED} .lane')[{row}].getBoundingClientRect()"
    return f"(() => {{ const a = {part}, b = {lane}; return [(a.left - b.left) / b.width, a.width / b.width]; }})()"


async def test_stages_are_drawn_in_time_with_later_tokens_behind_them(page: Page, gateway: Gateway) -> None:
    await opened(page, gateway, stages=STAGES)

    names = f"[...document.querySelectorAll('{OPENED} .stage')].map((each) => each.textContent)"
    assert await page.evaluate(names) == ["router queue", "prefill", "transfer", "first step", "later tokens"]
    places = (("router_queue", 0.0, 0.1), ("prefill", 0.1, 0.3), ("transfer_exposed", 0.4, 0.05))
    for row, (stage, left, width) in enumerate((*places, ("first_step", 0.45, 0.05), ("decode", 0.5, 0.5))):
        assert await page.evaluate(place(f"stage-{stage}", row)) == pytest.approx([left, width], abs=0.02), stage
    assert page.problems == []


async def test_request_without_a_token_ends_with_its_unfinished_stage(page: Page, gateway: Gateway) -> None:
    await opened(
        page, gateway, stages={"router_queue_ms": 250.0, "prefill_ms": 0.0, "ttft_ms": 0.0, "total_ms": 1000.0}
    )

    assert await page.evaluate(place("stage-unfinished", 1)) == pytest.approx([0.25, 0.75], abs=0.02)


async def test_stall_is_a_mark_in_its_place_with_its_causes_and_culprits(page: Page, gateway: Gateway) -> None:
    causes = (
        {"cause": "prompt_tokens", "ms": 80.0, "culprit": "req-long", "detail": "1024 tokens"},
        {"cause": "larger_batch", "ms": 10.0, "by_another": True},
    )
    stalls = [stall(700.0, 100.0, *causes), stall(900.0, 20.0)]
    tbt = {"p50_ms": 10.0, "p99_ms": 20.0, "max_ms": 100.0}
    await opened(page, gateway, stages=STAGES, tbt=tbt, stalls=stalls, stall_count=2)

    assert await page.evaluate(count(f"{OPENED} .stall")) == 2
    assert await page.evaluate(place("stall", 4)) == pytest.approx([0.6, 0.1], abs=0.02)
    assert "2 stalls" in await page.evaluate(text("[data-request=r1] .age"))
    title = await page.evaluate(f"document.querySelector('{OPENED} .stall').title")
    assert "prompt tokens 80 ms by req-long (1024 tokens)" in title
    assert "larger batch 10 ms by a request of another key" in title


async def test_drafts_are_counted_in_the_row_and_judged_where_it_is_opened(page: Page, gateway: Gateway) -> None:
    drafts = {"drafted_tokens": 20, "accepted_tokens": 12, "saved_ms": 34.0}
    await opened(page, gateway, stages=STAGES, drafts=drafts)

    assert "12 of 20 drafts" in await page.evaluate(text("[data-request=r1] .age"))
    assert "Drafts: 12 of 20 tokens were drawn, about 34 ms sooner" in await page.evaluate(text(OPENED))


async def test_stalls_can_be_read_without_seeing(page: Page, gateway: Gateway) -> None:
    by = {"cause": "prompt_tokens", "culprit": "req-long", "detail": "1024 tokens"}
    await opened(page, gateway, stages=STAGES, stalls=[stall(700.0, 100.0, by)], stall_count=9)

    said = "100 ms after 700 ms = prompt tokens 90 ms by req-long (1024 tokens) + usual 10 ms"
    mark = f"document.querySelector('{OPENED} .stall')"
    assert await page.evaluate(f"{mark}.getAttribute('aria-label')") == said
    assert await page.evaluate(text(f"{OPENED} ul li")) == said
    assert "The longest 1 of 9 stalls:" in await page.evaluate(text(OPENED))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 1320])
async def test_marks_stand_out_and_stay_in_their_lane(page: Page, gateway: Gateway, width: int, dark: bool) -> None:
    await page.shape(width, 900, mobile=width < 768, dark=dark)
    await opened(page, gateway, stages=STAGES, stalls=[stall(1000.0, 1.0), stall(600.0, 50.0)], stall_count=2)

    mark, stage = [
        await page.evaluate(f"getComputedStyle(document.querySelector('{OPENED} .lane {each}')).backgroundColor")
        for each in (".stall", ".stage-decode")
    ]
    assert mark != stage
    edges = (
        f"(() => {{ const lane = document.querySelector('{OPENED} .lane').getBoundingClientRect();"
        f"return [...document.querySelectorAll('{OPENED} .stall')].map((each) => each.getBoundingClientRect())"
        ".every((each) => each.left >= lane.left - 2 && each.right <= lane.right + 6 && each.width >= 4); })()"
    )
    assert await page.evaluate(edges)
    assert await page.evaluate("document.documentElement.scrollWidth") == width


async def test_answer_of_the_workers_is_drawn_as_the_router_measured_it(page: Page, gateway: Gateway) -> None:
    gateway.says("a long answer")
    await gateway.post("/v1/completions", prompt="abc", max_tokens=8)
    await visit(page, gateway.port)
    await page.until(f"{count('.request')} === 1")
    await page.evaluate("document.querySelector('.request summary').click()")

    await page.until(f"{count(OPENED + ' .lane')} > 1")
    assert "Time between tokens: p50" in await page.evaluate(text(OPENED))
    assert page.problems == []
