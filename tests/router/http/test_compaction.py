"""Compaction of conversations over the Responses API."""

from typing import Any

import pytest

from tests.router.http.conftest import Gateway

CONVERSATION = [
    {"role": "user", "content": "find it"},
    {"role": "assistant", "content": "found long details"},
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "many lines"},
]


async def compacted(gateway: Gateway, **fields: Any) -> Any:
    gateway.says("it is in a.py")
    return await gateway.post("/v1/responses/compact", input=CONVERSATION, **fields)


async def test_compaction_returns_the_users_messages_and_an_opaque_summary(gateway: Gateway) -> None:
    answer = await compacted(gateway, instructions="be brief", tools=[{"type": "web_search"}])
    message, item = answer["output"]
    assert (answer["object"], message["role"], message["content"][0]["text"]) == (
        "response.compaction",
        "user",
        "find it",
    )
    assert (item["type"], "a.py" in item["encrypted_content"]) == ("compaction", False)
    assert answer["usage"]["output_tokens"] > 0
    prompt = gateway.prompt()
    assert "many lines" in prompt and prompt.rindex("Summarise the conversation") > prompt.index("many lines")


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary"])
async def test_compacted_conversation_continues_with_its_summary(gateway: Gateway, kind: str) -> None:
    items = (await compacted(gateway))["output"]
    items[-1]["type"] = kind
    await gateway.post("/v1/responses", input=[*items, {"role": "user", "content": "go on"}])
    prompt = gateway.prompt()
    assert prompt.index("find it") < prompt.index("it is in a.py") < prompt.index("go on")
    assert "many lines" not in prompt


async def test_stored_response_is_compacted(gateway: Gateway) -> None:
    first = await gateway.post("/v1/responses", input="hi there", max_output_tokens=2)
    answer = await gateway.post("/v1/responses/compact", previous_response_id=first["id"], max_output_tokens=3)
    assert [item["type"] for item in answer["output"]] == ["message", "compaction"]


@pytest.mark.parametrize("content", ["gAAAAABo", "", "WzEsIDJd", "\u00e4"])
async def test_compaction_item_of_another_server_is_rejected(gateway: Gateway, content: str) -> None:
    error = await gateway.refused("/v1/responses", input=[{"type": "compaction", "encrypted_content": content}])
    assert error["param"] == "input"
    assert "did not write" in error["message"]


async def test_compaction_without_a_conversation_is_rejected(gateway: Gateway) -> None:
    assert (await gateway.refused("/v1/responses/compact"))["param"] == "input"
