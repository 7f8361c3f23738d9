"""/docs as a browser shows it: every route and field of /openapi.json, from this service alone."""

from typing import Any

import pytest

from baton.process.security.api_keys import digest_of
from tests.fixtures.chromium import Page, find_chromium
from tests.router.http.conftest import Gateway

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")

ROUTES = "[...document.querySelectorAll('[data-route]')].map((route) => route.dataset.route)"


async def test_every_route_and_field_is_shown(page: Page, gateway: Gateway) -> None:
    document = (await gateway.client.get("/openapi.json")).json()
    await page.shape(360, 640)

    await page.ask("Page.navigate", url=f"http://127.0.0.1:{gateway.port}/docs")
    await page.until("document.querySelector('[data-route]') !== null")

    shown = [path for path, operations in document["paths"].items() for _ in operations]
    assert await page.evaluate(ROUTES) == shown
    shown = "document.querySelector('[data-route=\"/v1/chat/completions\"] > table')"
    names = await page.evaluate(f"[...{shown}.rows].map((row) => row.cells[0].textContent)")
    assert names == list(document["components"]["schemas"]["ChatRequest"]["properties"])
    assert "reasoning_content" in await page.evaluate(f"{shown}.textContent"), "fields of a message too"
    await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert await page.evaluate("document.documentElement.scrollWidth <= 360")
    assert page.problems == []
    assert all(url.startswith(f"http://127.0.0.1:{gateway.port}/") for url in page.fetched)


@pytest.mark.parametrize("settings", [{"api_key_hashes": f"user:{digest_of('baton-user').hex()}"}], indirect=True)
async def test_key_is_requested_if_keys_are_configured(page: Page, gateway: Gateway, settings: Any) -> None:
    await page.ask("Page.navigate", url=f"http://127.0.0.1:{gateway.port}/docs")
    await page.until("document.readyState === 'complete' && !document.getElementById('keys').hidden")

    await page.type("#key", "baton-user")

    await page.until("document.getElementById('keys').hidden && document.querySelector('[data-route]') !== null")
