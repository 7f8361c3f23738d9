"""The smaller routes: responses, the simple server, tokenizer, models, metrics, and the document of all of them."""

import itertools
import json

from baton.versions import PROTOCOL, RELEASE, UNANNOUNCED_RELEASE
from tests.router.conftest import encode
from tests.router.http.conftest import Gateway


async def test_generate_answers_with_prompt_and_output(gateway: Gateway) -> None:
    assert await gateway.post("/generate", prompt="ab", max_tokens=3, n=2) == {"text": ["ababa", "abbab"]}


async def test_generate_streams_cumulative_texts_between_zero_bytes(gateway: Gateway) -> None:
    response = await gateway.client.post("/generate", json={"prompt": "ab", "max_tokens": 3, "stream": True})

    *texts, rest = response.content.split(b"\0")
    assert rest == b""
    said = [json.loads(text)["text"][0] for text in texts]
    assert said[-1] == "ababa" and all(later.startswith(earlier) for earlier, later in itertools.pairwise(said))


async def test_texts_and_tokens_there_and_back(gateway: Gateway) -> None:
    tokenized = await gateway.post("/tokenize", prompt="héllo", return_token_strs=True)

    assert tokenized["tokens"] == encode("héllo") and tokenized["count"] == 6
    assert tokenized["token_strs"][1:3] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert (await gateway.post("/detokenize", tokens=tokenized["tokens"])) == {"prompt": "héllo"}
    chat = await gateway.post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert chat["tokens"] == encode("[user]hi[assistant]")
    assert (await gateway.refused("/tokenize"))["param"] == "prompt"
    assert (await gateway.refused("/detokenize", tokens=[5, 999]))["param"] == "tokens[1]"


async def test_models_health_and_readiness(gateway: Gateway) -> None:
    get = gateway.client.get

    (model,) = (await get("/v1/models")).json()["data"]

    assert model["id"] == "tiny" and model["object"] == "model" and model["max_model_len"] == 1024
    assert (await get("/v1/models/tiny")).json() == model
    assert (await get("/v1/models/other")).status_code == 404
    health = await get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert (await get("/ready")).json() == {"ready": True, "detail": ""}
    version = (await get("/version")).json()
    assert (version["version"], version["protocol"]) == (RELEASE, PROTOCOL)
    assert version["grpc_port"] == gateway.process.running.ports[0]


async def test_metrics_count_requests(gateway: Gateway) -> None:
    gateway.says("hello")
    await gateway.post("/v1/completions", prompt="abc", max_tokens=4)
    await gateway.refused("/v1/completions", prompt="abc", n=1000)

    text = (await gateway.client.get("/metrics")).text

    labels = 'engine="router",model_name="tiny"'
    assert f"vllm:prompt_tokens_total{{{labels}}} 3.0" in text
    assert f"vllm:generation_tokens_total{{{labels}}} 4.0" in text
    assert 'vllm:request_success_total{engine="router",finished_reason="length",model_name="tiny"} 1.0' in text
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0" in text
    assert 'vllm:inter_token_latency_seconds_bucket{engine="router",le="+Inf",model_name="tiny"}' in text
    assert 'vllm:num_requests_running{engine="decode-0",model_name="tiny"} 0.0' in text
    assert f'baton_build_info{{engine="router",protocol="{PROTOCOL}",version="{RELEASE}"}} 1.0' in text
    assert f'baton_build_info{{engine="decode-0",protocol="1",version="{UNANNOUNCED_RELEASE}"}} 1.0' in text
    assert "baton:refused_workers 0.0" in text
    assert 'baton:requests_ended_total{outcome="refused",reason="invalid_argument"} 1.0' in text
    assert "# TYPE baton:steps_total counter" in text


async def test_document_names_every_route_and_its_message(gateway: Gateway) -> None:
    document = (await gateway.client.get("/openapi.json")).json()

    assert document["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys() == {
        "text/plain", "application/openmetrics-text",
    }  # fmt: skip
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    assert {"prompt", "max_tokens", "stop_token_ids"} <= document["components"]["schemas"][name]["properties"].keys()
