"""How requests come in: bodies, methods, headers, and what is refused before it costs anything."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest
from starlette.datastructures import Headers

from baton.router.http.edge.exchange import BodyReader, problem_reply
from baton.router.http.edge.problem import Problem
from tests.router.conftest import encode
from tests.router.http.conftest import Gateway

PATH = "/v1/completions"


async def test_malformed_body_is_rejected(gateway: Gateway) -> None:
    for body in [b"", b"{", b'{"prompt": "\xff"}', b"[" * 100_000, b"null", b'"text"', b"[]"]:
        response = await gateway.client.post(PATH, content=body)

        assert response.status_code == 400, body[:20]
        assert response.json()["error"]["type"] == "invalid_request_error"


WRONG_HEADERS = {
    "content-encoding": ("gzip", "br", "zstd", "identity, gzip", "deflate"),
    "content-type": ("multipart/form-data; boundary=a", "application/xml", "text/html", "json"),
}
PLAIN_TYPES: tuple[str, ...] = ("application/json", "Application/JSON; charset=utf-8", "application/problem+json", "")
PLAIN_TYPES += ("text/plain;charset=UTF-8", "application/x-www-form-urlencoded")


async def test_body_of_another_coding_or_type_is_refused_by_its_header(gateway: Gateway) -> None:
    for name, value in ((name, value) for name, values in WRONG_HEADERS.items() for value in values):
        response = await gateway.client.post(PATH, content=b'{"prompt": "a"}', headers={name: value})

        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (415, name, "unsupported_media_type")
        assert value.partition(";")[0] in error["message"]


async def test_body_is_read_despite_the_content_types_of_plain_clients(gateway: Gateway) -> None:
    for given in PLAIN_TYPES:
        headers = {"content-type": given, "content-encoding": "identity"}
        response = await gateway.client.post(PATH, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)

        assert response.status_code == 200, given


async def test_body_in_single_bytes_takes_no_more_memory_than_its_size() -> None:
    reader = BodyReader(1 << 20, 1 << 20, 10.0)
    events = iter([{"type": "http.request", "body": b"ab", "more_body": True}] * 20_000)

    async def receive() -> Any:
        return next(events, {"type": "http.request", "body": b"c", "more_body": False})

    with await reader.read(Headers(), receive) as body:
        assert b"".join(body.parts) == b"ab" * 20_000 + b"c"
        assert len(body.parts) < 100


@pytest.mark.parametrize("settings", [{"http_max_body": 1000}], indirect=True)
async def test_body_over_the_limit_is_refused_with_or_without_its_length(gateway: Gateway) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    for content in (b" " * 1001, chunks()):
        response = await gateway.client.post(PATH, content=content)

        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_prompt_of_ten_megabytes_is_refused_before_it_is_read(gateway: Gateway) -> None:
    response = await gateway.client.post(PATH, json={"prompt": "word " * (2 << 20)})

    assert response.status_code == 413 and "exceeds 4 MiB" in response.json()["error"]["message"]


async def test_too_many_elements_are_rejected_before_parsing(gateway: Gateway) -> None:
    body = b'{"prompt": [' + b"1," * (1 << 20) + b"1]}"

    response = await gateway.client.post(PATH, content=body)

    assert response.status_code == 400 and "elements" in response.json()["error"]["message"]


@pytest.mark.parametrize("settings", [{"http_all_bodies": 1000}], indirect=True)
async def test_all_bodies_together_have_a_bound(gateway: Gateway) -> None:
    response = await gateway.client.post(PATH, content=b" " * 2000)

    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert (await gateway.client.post(PATH, json={"prompt": "a", "max_tokens": 1})).status_code == 200


async def test_wrong_method_is_answered_with_the_allowed_one(gateway: Gateway) -> None:
    response = await gateway.client.get(PATH)

    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert (await gateway.client.post("/v1/models")).status_code == 405


async def test_unknown_path_is_an_error_object_too(gateway: Gateway) -> None:
    response = await gateway.client.post("/v1/audio/speech", json={})

    assert response.status_code == 404 and response.json()["error"]["code"] == "unknown_path"


async def test_request_id_is_returned_and_names_the_answer(gateway: Gateway) -> None:
    body = {"prompt": "a", "max_tokens": 1}

    given = await gateway.client.post(PATH, json=body, headers={"x-request-id": "mine-1"})
    drawn = await gateway.client.post(PATH, json=body)

    assert given.headers["x-request-id"] == "mine-1" and given.json()["id"] == "cmpl-mine-1"
    assert drawn.headers["x-request-id"] and drawn.json()["id"] == f"cmpl-{drawn.headers['x-request-id']}"


@pytest.mark.parametrize("settings", [{"max_active": 1}], indirect=True)
async def test_full_service_sends_retry_after(gateway: Gateway) -> None:
    async with gateway.held(PATH, prompt="a"):
        response = await gateway.client.post(PATH, json={"prompt": "a"})

    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_client_is_never_asked_back_too_early() -> None:
    reply = problem_reply(Problem(HTTPStatus.TOO_MANY_REQUESTS, "busy", retry_after_s=5.4))

    assert reply.headers["retry-after"] == "6"


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_before_the_first_token_frees_both_workers(gateway: Gateway, stream: bool) -> None:
    async with gateway.held(PATH, prompt="a", stream=stream):
        pass

    cancelled = {(await worker.received("cancel")).attempt_id for worker in (gateway.pair.prefill, gateway.pair.decode)}
    assert len(cancelled) == 1


async def test_client_that_goes_in_the_middle_of_a_stream_frees_decode(gateway: Gateway) -> None:
    gateway.pair.manual = True

    async def say_one_token() -> int:
        attempt_id: int = (await gateway.pair.prefill.received("prefill")).attempt_id
        gateway.pair.first_step(attempt_id, encode("x"))
        return attempt_id

    saying = asyncio.create_task(say_one_token())
    async with gateway.client.stream("POST", PATH, json={"prompt": "a", "stream": True}) as response:
        assert '"x"' in await anext(response.aiter_lines())
    attempt_id = await saying

    assert (await gateway.pair.decode.received("cancel")).attempt_id == attempt_id
