"""Web pages that call a router without keys: its own, those of other sites, and those that it allows."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

import pytest

from baton.process.config import ConfigError
from baton.process.errors import PermissionDenied
from baton.process.security.api_keys import digest_of
from baton.router.config import RouterConfig
from baton.router.http.edge.sites import SiteRules
from tests.fixtures.chromium import Page, find_chromium
from tests.router.http.conftest import Gateway

BODY = {"prompt": "a", "max_tokens": 1}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def refusal(rules: SiteRules, path: str = "/v1/models", method: str = "GET", **headers: str) -> str | None:
    """The reason, None where the call is allowed. Headers are written with underscores."""
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        rules.check({"type": "http", "path": path, "method": method, "headers": fields})
    except PermissionDenied as error:
        return error.reason
    return None


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "[::1]:8000", "[fd00::1]", "localhost", "LOCALHOST:1"),
        *("localhost.:80", "gpu-box:8000", "a.internal.test", "a.b.internal.test:1"),
    ],
)
def test_host_with_an_address_or_known_name_is_allowed(host: str) -> None:
    assert refusal(SiteRules(("GPU-box", "*.internal.test"), ()), host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "internal.test"),
        *("xinternal.test", "gpu-box.test", "127.1", "2130706433", "0x7f.1", ""),
    ],
)
def test_host_with_another_name_is_rejected(host: str) -> None:
    assert refusal(SiteRules(("gpu-box", "*.internal.test"), ("*",)), host=host) == "HOST_NOT_ALLOWED"


def test_call_without_host_is_allowed_since_no_browser_sends_it() -> None:
    assert refusal(SiteRules((), ())) is None


def test_any_host_is_allowed_by_a_star() -> None:
    assert refusal(SiteRules(("*",), ()), host="evil.example") is None


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, None),
        ({"sec_fetch_site": "same-origin", "origin": "http://localhost:8000"}, None),
        ({"sec_fetch_site": "none"}, None),
        ({"origin": "http://localhost:8000"}, None),
        ({"origin": "https://localhost:8000"}, None),
        ({"origin": "https://app.example"}, None),
        ({"origin": "https://app.example", "sec_fetch_site": "cross-site"}, None),
        ({"sec_fetch_site": "cross-site"}, "CROSS_SITE"),
        ({"sec_fetch_site": "same-site"}, "CROSS_SITE"),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}, "CROSS_SITE"),
        ({"origin": "http://localhost:8001"}, "CROSS_SITE"),
        ({"origin": "http://evil.example"}, "CROSS_SITE"),
        ({"origin": "http://app.example"}, "CROSS_SITE"),
        ({"origin": "HTTP://LOCALHOST:8000"}, None),
        ({"origin": "null"}, "CROSS_SITE"),
        ({"origin": "http://["}, "CROSS_SITE"),
        ({"origin": "http://localhost:8000/"}, "CROSS_SITE"),
        ({"origin": "http://localhost:8000?evil"}, "CROSS_SITE"),
        ({"origin": "//localhost:8000"}, "CROSS_SITE"),
    ],
)
def test_call_of_another_site_is_refused(headers: dict[str, str], reason: str | None) -> None:
    assert refusal(SiteRules((), ("https://app.example",)), host="localhost:8000", **headers) == reason


@pytest.mark.parametrize(("dest", "reason"), [("document", None), ("iframe", "CROSS_SITE")])
def test_link_of_another_site_opens_the_page_but_no_frame(dest: str, reason: str | None) -> None:
    headers = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": dest}
    assert refusal(SiteRules((), ()), "/", host="localhost", **headers) == reason


@pytest.mark.parametrize("hosts", ["http://a", "a:80", "a b", "*.", "*a"])
def test_invalid_allowed_hosts_are_rejected(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-hosts.*is not a host name"):
        RouterConfig(workers="decode@a:1", allowed_hosts=hosts)


@pytest.mark.parametrize("origins", ["app.example", "https://app.example/", "https://", "null"])
def test_invalid_cors_origins_are_rejected(origins: str) -> None:
    with pytest.raises(ConfigError, match=r"--cors-origins.*is not an origin"):
        RouterConfig(workers="decode@a:1", cors_origins=origins)


def computed(gateway: Gateway) -> list[str]:
    return [kind for each in gateway.pair.prefill.commands if (kind := each.WhichOneof("command")) == "prefill"]


PATHS = ("/", "/v1/models", "/v1/responses/resp_1", "/page/state", "/metrics", "/openapi.json", "/nothing")


async def test_every_route_refuses_foreign_pages(gateway: Gateway) -> None:
    for path, foreign in product(PATHS, ({"host": "evil.example"}, {"sec-fetch-site": "same-site"})):
        response = await gateway.client.get(path, headers=foreign)

        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error"), path


async def test_text_that_another_site_posts_computes_nothing(gateway: Gateway) -> None:
    headers = {"content-type": "text/plain", "origin": "http://evil.example"}
    response = await gateway.client.post("/v1/completions", content=json.dumps(BODY), headers=headers)

    assert (response.status_code, response.json()["error"]["code"]) == (403, "cross_site")
    assert "access-control-allow-origin" not in response.headers
    assert computed(gateway) == []


@pytest.mark.parametrize("settings", [{"allowed_hosts": "baton, *.svc"}], indirect=True)
async def test_names_of_a_cluster_are_allowed_by_configuration(gateway: Gateway) -> None:
    for host in ("baton:8000", "baton.default.svc"):
        assert (await gateway.client.get("/v1/models", headers={"host": host})).status_code == 200


KEYED = {"api_key_hashes": f"app:{digest_of('baton-secret').hex()}"}
CORS = {"cors_origins": "https://app.example"}


@pytest.mark.parametrize("settings", [CORS, CORS | KEYED], indirect=True)
async def test_pages_of_an_allowed_origin_may_call_and_read(gateway: Gateway) -> None:
    origin = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    preflight = await gateway.client.options("/v1/completions", headers=origin | PREFLIGHT)
    answer = await gateway.client.post(
        "/v1/completions", json=BODY, headers=origin | {"authorization": "Bearer baton-secret"}
    )
    refused = await gateway.client.post("/v1/completions", json={"x": 1}, headers=origin)
    foreign = await gateway.client.options("/v1/completions", headers={"origin": "https://evil.example"} | PREFLIGHT)

    assert (preflight.status_code, answer.status_code, foreign.status_code) == (200, 200, 400)
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for response in (preflight, answer, refused):
        assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("settings", [KEYED], indirect=True)
async def test_key_suffices_for_any_host_name(gateway: Gateway) -> None:
    headers = {"host": "api.example", "authorization": "Bearer baton-secret"}
    assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200


FETCH = """(async () => {
  const tries = {
    simple: () => fetch('%(to)s/v1/completions', {method: 'POST', mode: 'no-cors', body: '%(body)s'}),
    json: () => fetch('%(to)s/v1/completions', {method: 'POST', body: '%(body)s',
                                               headers: {'content-type': 'application/json'}}),
    read: () => fetch('%(to)s/v1/models').then(response => response.json()),
    state: () => fetch('%(to)s/page/state').then(response => response.json()),
  };
  const found = {};
  for (const [name, request] of Object.entries(tries)) {
    try { const got = await request(); found[name] = got.type ?? (got.error ? got.error.code : 'read'); }
    catch (error) { found[name] = error.name; }
  }
  return JSON.stringify(found);
})()"""


@asynccontextmanager
async def foreign_site() -> AsyncIterator[int]:
    """The port of a site whose pages are empty."""
    open_ones = set[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        while await reader.readline() not in (b"\r\n", b""):
            continue
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/html\r\n\r\n<hr>")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in open_ones:
        writer.close()


@pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")
async def test_browser_with_a_foreign_or_rebound_page_computes_and_reads_nothing(gateway: Gateway, page: Page) -> None:
    async with foreign_site() as other_port:
        for name, to in (
            (f"http://evil.example:{other_port}", f"http://127.0.0.1:{gateway.port}"),
            (f"http://127.0.0.1:{other_port}", f"http://127.0.0.1:{gateway.port}"),
            (f"http://localhost:{other_port}", f"http://localhost:{gateway.port}"),
            (f"http://evil.example:{other_port}", f"http://evil.example:{gateway.port}"),
        ):
            await page.ask("Page.navigate", url=name)
            await page.until(f"location.origin === '{name}' && document.readyState === 'complete'")
            found = json.loads(await page.evaluate(FETCH % {"to": to, "body": json.dumps(BODY)}))

            assert found["simple"] in ("opaque", "TypeError"), name
            assert (found["json"], found["read"], found["state"]) == ("TypeError",) * 3, name
    rebound = f"http://evil.example:{gateway.port}"
    await page.ask("Page.navigate", url=f"{rebound}/nothing")
    await page.until(f"location.origin === '{rebound}' && document.readyState === 'complete'")
    found = json.loads(await page.evaluate(FETCH % {"to": rebound, "body": json.dumps(BODY)}))

    assert (found["read"], found["state"]) == ("host_not_allowed",) * 2
    assert computed(gateway) == []
