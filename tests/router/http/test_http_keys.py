"""API keys over HTTP: no route without one, OpenAI's errors, limits; and TLS on both public ports."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from baton.cli.keys import make_certificates
from baton.client import AsyncBatonClient, NotAllowed, RetryPolicy, Unavailable
from baton.process.security.api_keys import ApiKey, KeyLimits, digest_of
from baton.router.http.app import Operations
from baton.router.http.edge.exchange import FullReply
from tests.router.http.conftest import WAIT_S, Gateway

KEYS = (
    ApiKey("one", digest_of("baton-one")),
    ApiKey("boss", digest_of("baton-boss"), is_admin=True),
    ApiKey("busy", digest_of("baton-busy"), KeyLimits(tokens_per_minute=60, max_context_tokens=30)),
)
HASHES = ",".join(f"{key.name}:{key.sha256.hex()}" for key in KEYS[:2])
by_hashes = pytest.mark.parametrize("settings", [{"api_key_hashes": HASHES}], indirect=True)


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, shown("baton-wrong"), {"authorization": "baton-one"}])
async def test_no_route_answers_without_a_key(gateway: Gateway, headers: dict[str, str]) -> None:
    document = (await gateway.client.get("/openapi.json", headers=shown("baton-one"))).json()
    paths = [path.replace("{model}", "tiny") for path in document["paths"] if path not in ("/health", "/ready")]
    paths += ["/none", "/health/", "/v1", "/v1/%2e%2e/health", "/HEALTH", "/health%00"]  # / is a page
    paths.append(f"http://127.0.0.1:{gateway.port}//health")  # without a host it would be one
    assert len(paths) > 15
    for path in paths:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            response = await gateway.client.request(method, path, headers=headers, content=b"{")
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = response.json()["error"]
                if path.startswith("/api/"):
                    assert isinstance(error, str) and error
                else:
                    assert error["type"] == "authentication_error"
                    assert "/messages" in path or error["code"] == "invalid_api_key"
                assert "wrong" not in response.text


async def test_health_and_readiness_answer_all_and_metrics_administrators(gateway: Gateway) -> None:
    assert (await gateway.client.get("/health")).status_code == 200
    await gateway.client.get("/v1/models", headers=shown("baton-one"))  # waits until it is ready
    assert (await gateway.client.get("/ready")).json() == {"ready": True, "detail": ""}
    refused = await gateway.client.get("/metrics", headers=shown("baton-one"))
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert (await gateway.client.get("/metrics", headers=shown("baton-boss"))).status_code == 200


@pytest.mark.parametrize(("is_guarded", "shown_detail"), [(True, ""), (False, "worker decode-7 failed")])
async def test_callers_without_a_needed_key_do_not_learn_why_it_is_not_ready(
    is_guarded: bool, shown_detail: str
) -> None:
    dispatcher = cast("Any", SimpleNamespace(draining=False))
    readiness = cast("Any", SimpleNamespace(ready=False, detail="worker decode-7 failed"))
    reply = await Operations(dispatcher, readiness, int, is_guarded).ready({})
    assert isinstance(reply, FullReply) and reply.status == 503
    assert json.loads(reply.body) == {"ready": False, "detail": shown_detail}


@by_hashes
async def test_with_a_key_all_is_as_without_keys(gateway: Gateway) -> None:
    gateway.client.headers.update(shown("baton-one"))
    assert (await gateway.post("/v1/completions", prompt="ab", max_tokens=3))["choices"][0]["text"] == "aba"
    assert (await gateway.post("/tokenize", prompt="ab"))["count"] == 2
    assert len(await gateway.stream("/v1/completions", prompt="ab", max_tokens=3)) > 1


async def test_large_body_is_not_read_before_the_key_is_checked(gateway: Gateway) -> None:
    response = await gateway.client.post("/v1/completions", content=b"x" * (3 << 20))
    assert (response.status_code, response.headers["connection"]) == (401, "close")


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """As parametrised; else a key file, and TLS where the test's name says so."""
    if hasattr(request, "param"):
        given: dict[str, Any] = request.param
        return given
    (tmp_path / "keys").write_text("".join(key.line + "\n" for key in KEYS))
    fields: dict[str, Any] = {"api_keys": tmp_path / "keys"}
    if "tls" in request.node.name:
        make_certificates(tmp_path / "tls", (), days=1)
        fields |= {"tls_cert": tmp_path / "tls/server.pem", "tls_key": tmp_path / "tls/server-key.pem"}
    return fields


async def test_limits_are_429_with_retry_after(gateway: Gateway) -> None:
    gateway.client.headers.update(shown("baton-busy"))
    began_s = time.monotonic()
    await gateway.post("/v1/completions", prompt="x" * 15, max_tokens=10)
    await gateway.post("/v1/completions", prompt="x" * 15, max_tokens=15)
    response = await gateway.client.post("/v1/completions", json={"prompt": "x" * 15, "max_tokens": 3})
    assert response.status_code == 429
    # 15 tokens are wanted, 5 are left, and those that have come meanwhile: one comes a second.
    assert 10 - (time.monotonic() - began_s) <= int(response.headers["retry-after"]) <= 10
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    long = await gateway.refused("/v1/completions", prompt="x" * 40)
    assert long["code"] == "context_length_exceeded"


async def test_tls_on_both_ports_and_nothing_else(gateway: Gateway, tmp_path: Path) -> None:
    gateway.client.headers.update(shown("baton-one"))
    gateway.says("hello")
    completion = await gateway.post("/v1/completions", prompt="ab")
    assert completion["choices"][0]["text"] == "hello"
    grpc_target, http = f"localhost:{gateway.process.running.ports[0]}", f"localhost:{gateway.port}"
    authority, once = tmp_path / "tls/ca.pem", RetryPolicy(attempts=1)
    async with AsyncBatonClient(grpc_target, api_key="baton-one", tls=authority, timeout_s=WAIT_S) as client:
        assert (await client.complete("ab")).choices[0].text == "hello"
        assert await client.tokenize("ab")
    async with AsyncBatonClient(grpc_target, api_key="baton-two", tls=authority, timeout_s=WAIT_S) as client:
        for asked in (client.models(), client.complete("ab")):
            with pytest.raises(NotAllowed) as refused:
                await asked
            assert refused.value.reason == "INVALID_API_KEY"
    for tls in (False, True):  # in plain text, and trusting only those whom all trust
        async with AsyncBatonClient(grpc_target, api_key="baton-one", tls=tls, timeout_s=WAIT_S, retry=once) as client:
            with pytest.raises(Unavailable):
                await client.models()
    async with httpx2.AsyncClient(timeout=WAIT_S, trust_env=False) as stranger:
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get(f"https://{http}/health")
        with pytest.raises(httpx2.HTTPError):
            await stranger.get(f"http://{http}/health")


async def test_metrics_have_the_names_of_keys_and_never_a_key_nor_its_hash(gateway: Gateway) -> None:
    gateway.says("hello")
    await gateway.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3}, headers=shown("baton-one"))
    for prompt_tokens in (15, 15, 15, 25):  # the last is refused: of its 60 few are left, and one comes a second
        body = {"prompt": "x" * prompt_tokens, "max_tokens": 4}
        await gateway.client.post("/v1/completions", json=body, headers=shown("baton-busy"))
    text = (await gateway.client.get("/metrics", headers=shown("baton-boss"))).text
    assert 'baton:key_requests_ended_total{key="one",outcome="answered"} 1.0' in text
    assert 'baton:key_requests_limited_total{key="busy",limit="tokens_per_minute"} 1.0' in text
    assert 'baton:key_prompt_tokens_total{key="busy"} 45.0' in text
    assert 'baton:key_limit{key="busy",limit="tokens_per_minute"} 60.0' in text
    assert not any(secret in text for key in KEYS for secret in (f"baton-{key.name}", key.sha256.hex()))


@pytest.mark.parametrize("settings", [{}], indirect=True)
async def test_nothing_is_counted_by_shown_keys_without_configured_ones(gateway: Gateway) -> None:
    gateway.says("hello")
    await gateway.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3}, headers=shown("baton-one"))
    assert "baton:key_" not in (await gateway.client.get("/metrics")).text


async def test_anthropic_key_header_is_accepted(gateway: Gateway) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for key, status in (("baton-one", 200), ("baton-wrong", 401)):
        response = await gateway.client.post("/v1/messages", json=asked, headers={"x-api-key": key})
        assert response.status_code == status
    assert response.json()["type"] == "error"
