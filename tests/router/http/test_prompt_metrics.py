"""Conversations whose beginning the router knows: prompts as if read afresh, over HTTP and gRPC alike, and counted."""

from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from baton.protos import baton_pb2, baton_pb2_grpc
from tests.router.http.conftest import Gateway
from tests.router.tokenizers_for_tests import END

SAID = f"abc{END}" * 150  # 1500 characters, 600 tokens
WAIT_S = 10.0
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def counted(gateway: Gateway) -> tuple[float, float]:
    """Tokens that were read and that were known, so far."""
    families = text_string_to_metric_families((await gateway.client.get("/metrics")).text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return values["baton:prompt_tokens_read_total"], values["baton:prompt_tokens_known_total"]


async def grpc_generate(gateway: Gateway, **fields: Any) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.process.running.ports[0]}") as channel:
        sampling = baton_pb2.SamplingParams(max_tokens=2)
        call = baton_pb2_grpc.BatonServiceStub(channel).Generate(
            baton_pb2.GenerateRequest(sampling=sampling, **fields), timeout=WAIT_S
        )
        assert [response async for response in call]


async def test_chat_with_tools_continues_from_its_known_prefix(gateway: Gateway) -> None:
    gateway.says("yes")
    messages = [{"role": "user", "content": SAID}]
    for turn in range(3):
        read, known = await counted(gateway)
        answer = await gateway.post("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=4)
        prompt = gateway.prompt()
        assert prompt.startswith("[tools]") and prompt.endswith("[assistant]") and SAID in prompt
        assert answer["usage"]["prompt_tokens"] == len(gateway.prefill.token_ids)
        newly_read, newly_known = await counted(gateway)
        assert (newly_read - read) + (newly_known - known) == answer["usage"]["prompt_tokens"]
        assert (newly_known > known) == (turn > 0)
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {turn}?{END}"}]


async def test_prompt_read_over_http_is_known_over_grpc(gateway: Gateway) -> None:
    await gateway.post("/v1/completions", prompt=SAID, max_tokens=2)
    first = (list(gateway.prefill.token_ids), list(gateway.prefill.block_hashes))
    _, known = await counted(gateway)
    await grpc_generate(gateway, text=SAID)
    assert (list(gateway.prefill.token_ids), list(gateway.prefill.block_hashes)) == first
    assert (await counted(gateway))[1] > known


async def test_nothing_is_known_under_another_cache_salt(gateway: Gateway) -> None:
    await grpc_generate(gateway, text=SAID)
    before = await counted(gateway)
    await grpc_generate(gateway, text=SAID, cache_salt="mine")
    read, known = await counted(gateway)
    assert (read - before[0], known) == (600, before[1])
