"""The whole router over gRPC with scripted workers: answers."""

import asyncio

import grpc
import pytest

from baton.protos import baton_pb2, session_pb2
from tests.router.conftest import READY_S, Stack, echo, encode, text_of, tokens_of

STOP, LENGTH = baton_pb2.FINISH_REASON_STOP, baton_pb2.FINISH_REASON_LENGTH


async def test_an_answer_streams_from_start_to_finish(stack: Stack) -> None:
    responses = await stack.generate("hello", max_tokens=7)
    started, last = responses[0].started, responses[-1].finished
    assert (started.model, started.prompt_tokens) == ("tiny", 5)
    assert started.request_id.startswith("req-")
    assert text_of(responses) == "hellohe"
    assert tokens_of(responses) == encode("hellohe")
    assert last.reason == LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 7)
    assert last.timings.transport == "shared_memory"
    assert last.timings.transfer_bytes == 4096
    assert last.timings.prefill_pid == stack.prefill.info.pid
    assert last.timings.decode_pid == stack.decode.info.pid
    assert last.timings.ttft_ms > 0.0


async def test_both_workers_are_told_the_same(stack: Stack) -> None:
    await stack.generate("hello", max_tokens=3, seed=5, temperature=0.5)
    start = await stack.decode.received("start")
    prefill = await stack.prefill.received("prefill")
    assert start.attempt_id == prefill.attempt_id
    assert start.transfer_id == prefill.transfer_id and len(start.transfer_id) == 16
    assert start.prefill_endpoint == stack.prefill.endpoint
    assert start.sampling == prefill.sampling
    assert (start.sampling.seed, start.sampling.temperature, start.sampling.n) == (5, 0.5, 1)
    assert list(start.token_ids) == list(prefill.token_ids) == encode("hello")
    assert len(start.block_hashes) == 1 and start.block_hashes == prefill.block_hashes
    assert 0 < start.time_left_ms <= (READY_S + 0.1) * 1e3  # from 10 s on gRPC sends tenths of a second, rounded up


async def test_several_choices_share_one_prefill(stack: Stack) -> None:
    responses = await stack.generate("abc", max_tokens=4, n=3)
    assert [text_of(responses, index) for index in range(3)] == ["abca", "bcab", "cabc"]
    finished = [r.finished for r in responses if r.WhichOneof("event") == "finished"]
    assert sorted(f.index for f in finished) == [0, 1, 2]
    assert [f.HasField("usage") for f in finished] == [False, False, True]
    assert finished[-1].usage.completion_tokens == 12


async def test_the_end_of_sequence_token_ends_the_answer(stack: Stack) -> None:
    stack.pair.script = lambda prompt, choice: [*encode("ab"), 256, *encode("c")]
    responses = await stack.generate(max_tokens=10)
    assert text_of(responses) == "ab"
    assert tokens_of(responses) == [*encode("ab"), 256]
    last = responses[-1].finished
    assert (last.reason, last.stop_token_id, last.usage.completion_tokens) == (STOP, 256, 3)


async def test_ignore_eos_goes_on_past_it(stack: Stack) -> None:
    stack.pair.script = lambda prompt, choice: [*encode("ab"), 256, *encode("c")]
    responses = await stack.generate(max_tokens=4, ignore_eos=True)
    assert text_of(responses) == "abc"
    assert responses[-1].finished.reason == LENGTH


async def test_a_stop_string_cuts_the_answer_and_cancels_decode(stack: Stack) -> None:
    stack.pair.script = lambda prompt, choice: encode("one two three four")
    responses = await stack.generate(max_tokens=18, stop=["three", "ee f"])
    assert text_of(responses) == "one two "
    assert tokens_of(responses) == encode("one two ")
    last = responses[-1].finished
    assert (last.reason, last.stop_text, last.usage.completion_tokens) == (STOP, "three", 8)


async def test_an_answer_that_ends_at_its_first_token_cancels_decode(stack: Stack) -> None:
    responses = await stack.generate("xyz", max_tokens=1)
    assert text_of(responses) == "x"
    cancel = await stack.decode.received("cancel")
    start = await stack.decode.received("start")
    assert cancel.attempt_id == start.attempt_id


async def test_the_first_token_goes_out_before_the_kv_has_landed(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    sampling = baton_pb2.SamplingParams(max_tokens=2)
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello", sampling=sampling), timeout=10)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    stack.pair.first_step(attempt_id, encode("a"))
    assert (await call.read()).WhichOneof("event") == "started"
    assert (await call.read()).delta.text == "a"
    stack.pair.landed(attempt_id)
    stack.pair.step(attempt_id, 0, encode("ab"), end=session_pb2.END_REASON_LENGTH)
    assert (await call.read()).delta.text == "b"
    assert (await call.read()).finished.timings.transfer_exposed_ms == 0.5


async def test_chat_renders_the_models_template(stack: Stack) -> None:
    request = baton_pb2.ChatRequest(
        messages=[baton_pb2.ChatMessage(role="user", content="hi")], sampling=baton_pb2.SamplingParams(max_tokens=4)
    )
    responses = [response async for response in stack.stub.Chat(request, timeout=10)]
    assert list((await stack.prefill.received("prefill")).token_ids) == [
        *encode("[user]hi"), 256, *encode("[assistant]")
    ]  # fmt: skip
    assert text_of(responses) == "[use"


async def test_equal_prompts_share_block_hashes_only_under_one_salt(stack: Stack) -> None:
    await stack.ready()
    for salt in ("", "", "mine"):
        request = baton_pb2.GenerateRequest(
            text="hello world", cache_salt=salt, sampling=baton_pb2.SamplingParams(max_tokens=2)
        )
        assert [r async for r in stack.stub.Generate(request, timeout=10)]
    hashes = [list((await stack.prefill.received("prefill", i)).block_hashes) for i in (1, 2, 3)]
    assert len(hashes[0]) == 2
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


async def test_tokenize_detokenize_and_models(stack: Stack) -> None:
    tokenized = await stack.stub.Tokenize(baton_pb2.TokenizeRequest(text="héllo"), timeout=10)
    assert list(tokenized.token_ids) == encode("héllo")
    detokenize = baton_pb2.DetokenizeRequest(token_ids=[*tokenized.token_ids, 256], skip_special_tokens=True)
    assert (await stack.stub.Detokenize(detokenize)).text == "héllo"
    models = (await stack.stub.ListModels(baton_pb2.ListModelsRequest())).models
    assert [(m.name, m.max_model_len, m.vocab_size, m.dtype, m.block_size) for m in models] == [
        ("tiny", 128, 257, "float32", 4)
    ]
    assert (await stack.stub.GetModel(baton_pb2.GetModelRequest(model="tiny"))).model == models[0]


@pytest.mark.parametrize("settings", [{"model_name": "mine"}], indirect=True)
async def test_the_models_name_can_be_set(stack: Stack) -> None:
    responses = await stack.generate(max_tokens=2)
    assert responses[0].started.model == "mine"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.GetModel(baton_pb2.GetModelRequest(model="tiny"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_many_requests_at_once(stack: Stack) -> None:
    prompts = [f"prompt {number} " for number in range(50)]
    answers = await asyncio.gather(*(stack.generate(prompt, max_tokens=20) for prompt in prompts))
    for prompt, responses in zip(prompts, answers, strict=True):
        assert tokens_of(responses) == echo(encode(prompt), 0)[:20]
