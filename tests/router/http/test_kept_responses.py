"""Responses that are kept: for one API key, within bounds, in memory or on Redis."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.process.registry.redis_responses import RedisResponses, ResponseBounds
from baton.process.registry.redis_server import RedisServer
from baton.router.http.responses.store import MAX_RECORD_BYTES, MemoryRecords, Records
from tests.fixtures.waiting import eventually
from tests.router.http.conftest import Gateway
from tests.router.http.test_http_keys import shown
from tests.router.http.test_responses import CALL, PATH, TOOL

BOUNDS = ResponseBounds(ttl_s=60.0, per_owner=3, bytes_per_owner=100, all_bytes=150)


@pytest.fixture(params=["memory", "redis"])
async def records(request: pytest.FixtureRequest, module_redis: RedisServer) -> AsyncIterator[Records]:
    namespace = request.node.name
    made: Records = (
        MemoryRecords(BOUNDS) if request.param == "memory" else RedisResponses(module_redis.url, namespace, BOUNDS)
    )
    yield made
    await made.close()


async def there(records: Records, *names: str, owner: str = "a") -> list[str]:
    return [name for name in names if await records.get(owner, name) is not None]


async def test_record_is_found_only_by_its_owner(records: Records) -> None:
    await records.put("a", "resp_x y", b"1")
    assert await records.get("a", "resp_x y") == b"1"
    assert await records.get("b", "resp_x y") is None
    assert await records.delete("b", "resp_x y") is False
    assert await records.delete("a", "resp_x y") is True
    assert await records.delete("a", "resp_x y") is False
    assert await records.get("a", "resp_x y") is None


async def test_oldest_of_too_many_records_goes(records: Records) -> None:
    for name in ("1", "2", "3", "4"):
        await records.put("a", name, b"x")
    assert await there(records, "1", "2", "3", "4") == ["2", "3", "4"]


async def test_oldest_of_too_many_bytes_goes(records: Records) -> None:
    for name in ("1", "2"):
        await records.put("a", name, b"x" * 50)
    await records.put("a", "3", b"x")
    assert await there(records, "1", "2", "3") == ["2", "3"]


async def test_records_within_a_millisecond_are_evicted_by_age(records: Records) -> None:
    for number in range(200, 100, -1):
        await records.put("a", str(number), b"x")
    assert await there(records, *(str(number) for number in range(101, 201))) == ["101", "102", "103"]


async def test_too_large_record_is_not_stored(records: Records) -> None:
    await records.put("a", "1", b"x" * 101)
    assert await there(records, "1") == []


async def test_all_owners_share_a_bound_too(records: Records) -> None:
    await records.put("a", "1", b"x" * 90)
    await records.put("b", "1", b"x" * 40)
    await records.put("b", "2", b"x" * 30)
    assert await there(records, "1") == []
    assert await there(records, "1", "2", owner="b") == ["1", "2"]


async def test_record_in_the_place_of_another_counts_once(records: Records) -> None:
    for size in (60, 60, 80, 80):
        await records.put("a", "1", b"x" * size)
    await records.put("a", "2", b"x" * 20)
    assert await there(records, "1", "2") == ["1", "2"]
    await records.delete("a", "1")
    await records.put("a", "3", b"x" * 80)
    assert await there(records, "2", "3") == ["2", "3"]


async def test_in_memory_a_record_is_gone_in_time() -> None:
    now = 0.0
    records = MemoryRecords(BOUNDS, lambda: now)
    await records.put("a", "1", b"x")
    now += 59.0
    await records.put("a", "2", b"x")
    assert await there(records, "1", "2") == ["1", "2"]
    now += 1.0
    assert await there(records, "1", "2") == ["2"]
    now += 60.0
    assert await there(records, "2") == [] and records.all_bytes == 0


async def test_on_redis_everything_has_a_time_to_live(module_redis: RedisServer) -> None:
    records = RedisResponses(module_redis.url, "lives", BOUNDS)
    await records.put("a", "1", b"x")
    keys = [key async for key in records.redis.scan_iter(match=records.key("*"))]
    assert len(keys) == 5
    for key in keys:
        assert 0 < await records.redis.pttl(key) <= 120_000
    await records.close()


async def test_on_redis_records_that_are_gone_are_not_counted(module_redis: RedisServer) -> None:
    short = RedisResponses(module_redis.url, "short", ResponseBounds(0.05, 3, 100, 150))
    await short.put("a", "1", b"x" * 90)

    async def is_gone() -> bool:
        return await short.get("a", "1") is None

    await eventually(is_gone)
    await short.put("a", "2", b"x" * 90)
    assert int(await short.redis.get(short.key("responses:bytes"))) == 90
    await short.close()


# Over HTTP


async def test_turn_continues_the_conversation_that_it_names(gateway: Gateway) -> None:
    gateway.says(f"I look. {CALL}")
    first = await gateway.post(PATH, input="Weather?", instructions="Be brief.", tools=[TOOL])
    call = first["output"][-1]
    gateway.says("Sunny.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = await gateway.post(PATH, input=[result], previous_response_id=first["id"])

    history = (
        '[user]Weather?[assistant]I look.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    assert gateway.prompt() == f"{history}[tool]sunny[assistant]", "without the instructions of the first turn"
    assert second["previous_response_id"] == first["id"] and second["store"] is True
    await gateway.post(PATH, input="Sure?", previous_response_id=second["id"], store=False)
    assert gateway.prompt() == f"{history}[tool]sunny[assistant]Sunny.[user]Sure?[assistant]"


async def test_thoughts_are_kept_for_the_next_turn(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>{CALL}")
    first = await gateway.post(PATH, input="Weather?", tools=[TOOL])
    items = (await gateway.client.get(f"{PATH}/{first['id']}")).json()["output"]
    assert [each["type"] for each in items] == ["reasoning", "function_call"]


async def test_streamed_response_is_stored_before_its_client_sees_the_end(gateway: Gateway) -> None:
    gateway.says("hello")
    response = await gateway.client.post(PATH, json={"input": "hi", "stream": True, "metadata": {"a": "b"}})
    last = json.loads(response.text.strip().rpartition("data: ")[2])["response"]
    assert last["store"] is True
    assert (await gateway.client.get(f"{PATH}/{last['id']}")).json() == last


async def test_response_is_got_and_deleted(gateway: Gateway) -> None:
    gateway.says("hello")
    made = await gateway.post(PATH, input="hi")
    url = f"{PATH}/{made['id']}"
    assert (await gateway.client.get(url)).json() == made
    assert (await gateway.client.delete(url)).json() == {"id": made["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        response = await gateway.client.request(method, url)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    assert (await gateway.client.get(f"{url}/input_items")).status_code == 404


async def test_input_items_are_listed_in_parts(gateway: Gateway) -> None:
    gateway.says("hello")
    given = [{"role": "user", "content": text} for text in "abc"]
    made = await gateway.post(PATH, input=given)
    url = f"{PATH}/{made['id']}/input_items"

    newest = (await gateway.client.get(url)).json()
    assert [each["content"][0]["text"] for each in newest["data"]] == ["c", "b", "a"]
    assert newest["has_more"] is False and newest["last_id"] == newest["data"][-1]["id"]
    first = (await gateway.client.get(url, params={"order": "asc", "limit": "2"})).json()
    assert [each["content"][0]["text"] for each in first["data"]] == ["a", "b"] and first["has_more"] is True
    rest = (await gateway.client.get(url, params={"order": "asc", "after": first["last_id"]})).json()
    assert [each["content"][0]["text"] for each in rest["data"]] == ["c"]
    for params, status in (({"limit": "0"}, 400), ({"order": "up"}, 400), ({"after": "x"}, 404), ({"b": "x"}, 400)):
        response = await gateway.client.get(url, params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (status, next(iter(params)))


async def test_unstored_response_is_not_kept(gateway: Gateway) -> None:
    gateway.says("hello")
    made = await gateway.post(PATH, input="hi", store=False)
    assert made["store"] is False
    assert (await gateway.client.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_expired_response_is_named_with_a_hint(gateway: Gateway) -> None:
    error = await gateway.refused(PATH, 404, input="hi", previous_response_id="resp_gone")
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "86400 s" in error["message"] and "Send the conversation as input" in error["message"]


@pytest.mark.parametrize("settings", [{"responses_per_key": 0}], indirect=True)
async def test_server_may_keep_nothing(gateway: Gateway) -> None:
    gateway.says("hello")
    made = await gateway.post(PATH, input="hi")
    assert made["store"] is False
    error = await gateway.refused(PATH, input="hi", store=True)
    assert (error["param"], error["code"]) == ("store", "response_not_stored")
    error = await gateway.refused(PATH, 404, input="hi", previous_response_id=made["id"])
    assert "stores none" in error["message"]


async def test_conversation_too_long_to_store_is_rejected_if_storing_is_required(gateway: Gateway) -> None:
    error = await gateway.refused(PATH, input="x" * (MAX_RECORD_BYTES + 1), store=True)
    assert (error["param"], error["code"]) == ("store", "response_not_stored")


async def test_callers_without_keys_are_distinguished_by_shown_keys(gateway: Gateway) -> None:
    gateway.says("hello")
    mine = await gateway.client.post(PATH, json={"input": "hi"}, headers=shown("one"))
    url = f"{PATH}/{mine.json()['id']}"
    assert (await gateway.client.get(url, headers=shown("two"))).status_code == 404
    assert (await gateway.client.delete(url, headers=shown("two"))).status_code == 404
    asked = {"input": "hi", "previous_response_id": mine.json()["id"]}
    assert (await gateway.client.post(PATH, json=asked, headers=shown("two"))).status_code == 404
    assert (await gateway.client.get(url, headers=shown("one"))).status_code == 200


@pytest.fixture
def on_redis(module_redis: RedisServer, settings: dict[str, Any]) -> str:
    settings |= {"redis_url": module_redis.url, "namespace": "http", "planner": "off"}
    return module_redis.url


async def test_on_redis_another_gateway_continues_it(on_redis: str, gateway: Gateway) -> None:
    gateway.says("hello")
    made = await gateway.post(PATH, input="hi")
    other = RedisResponses(on_redis, "http", BOUNDS)
    (key,) = [key async for key in other.redis.scan_iter(match=other.key("response:*"))]
    assert json.loads(await other.redis.get(key))["response"] == made
    assert (await gateway.client.get(f"{PATH}/{made['id']}")).json() == made
    await other.close()


@pytest.fixture
def lost_redis(settings: dict[str, Any]) -> None:
    settings |= {"redis_url": "redis://127.0.0.1:1/0", "planner": "off"}


async def test_response_without_redis_is_answered_and_marked_as_not_stored(lost_redis: None, gateway: Gateway) -> None:
    gateway.says("hello")
    made = await gateway.post(PATH, input="hi")
    assert made["status"] == "completed" and made["store"] is False
    error = await gateway.refused(PATH, 503, input="hi", previous_response_id=made["id"])
    assert error["code"] == "responses_unavailable"
