"""Sampling over gRPC with scripted workers: what workers are told (forms too), refusals, and log-probabilities."""

from typing import Any

import grpc

from baton.protos import baton_pb2, sampling_pb2, session_pb2
from tests.router.conftest import Stack, encode, text_of, tokens_of
from tests.router.test_router_refusals import ids, refusal, sampling

STOP = baton_pb2.FINISH_REASON_STOP
END = 256  # the end-of-sequence token of the model folder


def with_logprobs(output: session_pb2.SequenceOutput, top: int) -> session_pb2.SequenceOutput:
    """As a worker tells them: of token t, -t / 8, and t + 1, t + 2 and so on as the likeliest."""
    for token_id in output.token_ids:
        output.logprobs.append(-token_id / 8)
        output.top_token_ids.extend(token_id + rank for rank in range(1, top + 1))
        output.top_logprobs.extend(-rank / 4 for rank in range(1, top + 1))
    return output


def output(attempt_id: int, offset: int, token_ids: list[int], top: int, end: Any = 0) -> session_pb2.SequenceOutput:
    plain = session_pb2.SequenceOutput(attempt_id=attempt_id, offset=offset, token_ids=token_ids, end=end)
    return with_logprobs(plain, top)


def told(responses: list[Any]) -> list[tuple[int, float, list[int]]]:
    """Token, log-probability and likeliest tokens, over all deltas."""
    found = []
    for delta in (response.delta for response in responses if response.WhichOneof("event") == "delta"):
        width = len(delta.logprobs.top_token_ids) // max(1, len(delta.token_ids))
        assert len(delta.logprobs.chosen) == len(delta.token_ids)
        for index, token_id in enumerate(delta.token_ids):
            top = delta.logprobs.top_token_ids[index * width : (index + 1) * width]
            found.append((token_id, delta.logprobs.chosen[index], list(top)))
    return found


async def test_workers_are_told_every_field(stack: Stack) -> None:
    await stack.generate(
        max_tokens=3,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=0.25,
        logit_bias={5: -100.0},
        min_tokens=2,
        allowed_token_ids=[5, 6],
        bad_word_token_ids=[ids(7, 8)],
        logprobs=4,
        speculative=baton_pb2.Speculative(method="ngram", num_speculative_tokens=3),
    )
    expected = sampling_pb2.Sampling(
        max_tokens=3,
        top_p=1.0,
        seed=(start := await stack.decode.received("start")).sampling.seed,
        stop_token_ids=[END],
        n=1,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=0.25,
        logit_bias={5: -100.0},
        min_tokens=2,
        allowed_token_ids=[5, 6],
        bad_words=[sampling_pb2.BadWord(token_ids=[7, 8])],
        logprobs=4,
        most_drafted=3,
    )
    assert start.sampling == expected
    assert (await stack.prefill.received("prefill")).sampling == expected


async def test_absent_fields_are_neutral(stack: Stack) -> None:
    await stack.generate(max_tokens=3)
    told = (await stack.prefill.received("prefill")).sampling
    assert (told.typical_p, told.repetition_penalty, told.min_tokens) == (1.0, 1.0, 0)
    assert not (told.logit_bias or told.allowed_token_ids or told.bad_words or told.HasField("logprobs"))
    assert not told.HasField("most_drafted")


async def test_bad_words_become_tokens_as_they_stand(stack: Stack) -> None:
    """Of a tokenizer of single bytes: with a space before it, a word ends in itself, and is forbidden already."""
    await stack.generate(max_tokens=3, bad_words=["no", "never"], bad_word_token_ids=[ids(1)])
    words = (await stack.prefill.received("prefill")).sampling.bad_words
    assert [list(word.token_ids) for word in words] == [[1], encode("no"), encode("never")]


async def test_the_limits_themselves_are_served(stack: Stack) -> None:
    responses = await stack.generate(
        max_tokens=3,
        min_tokens=3,
        typical_p=1.0,
        repetition_penalty=10.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=dict.fromkeys(range(257), 100.0),
        allowed_token_ids=[5] * 1024,
        bad_words=["x" * 256] * 64,
        bad_word_token_ids=[ids(*[1] * 256)] * 64,
        logprobs=20,
    )
    assert len(tokens_of(responses)) == 3


async def test_stop_strings_wait_for_min_tokens(stack: Stack) -> None:
    stack.pair.script = lambda prompt, choice: encode("a|bc|d|e")
    responses = await stack.generate(max_tokens=8, min_tokens=3, stop=["|"])
    assert text_of(responses) == "a|bc"
    assert (responses[-1].finished.reason, responses[-1].finished.stop_text) == (STOP, "|")


async def test_logprobs_go_out_with_their_tokens_and_end_at_a_stop(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    request = sampling(max_tokens=8, stop=["cd"], logprobs=2)
    call = stack.stub.Generate(request, timeout=10)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    a, b, c, d = encode("abcd")
    first = session_pb2.FirstStep(attempt_id=attempt_id, outputs=[output(attempt_id, 0, [a], top=2)])
    stack.prefill.say(first_step=first)
    for step in (output(attempt_id, 0, [a, b], 2), output(attempt_id, 2, [c], 2), output(attempt_id, 3, [d], 2)):
        stack.decode.say(step_outputs=session_pb2.StepOutputs(outputs=[step]))
    responses = [response async for response in call]
    assert told(responses) == [(token_id, -token_id / 8, [token_id + 1, token_id + 2]) for token_id in (a, b)]
    assert responses[-1].finished.stop_text == "cd"


async def test_zero_logprobs_tell_only_the_chosen_tokens(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    call = stack.stub.Generate(sampling(max_tokens=1, logprobs=0), timeout=10)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    only = output(attempt_id, 0, [9], top=0, end=session_pb2.END_REASON_LENGTH)
    stack.prefill.say(first_step=session_pb2.FirstStep(attempt_id=attempt_id, outputs=[only]))
    assert told([response async for response in call]) == [(9, -9 / 8, [])]


async def test_without_being_asked_there_are_no_logprobs(stack: Stack) -> None:
    responses = await stack.generate(max_tokens=4)
    assert not any(r.delta.HasField("logprobs") for r in responses if r.WhichOneof("event") == "delta")


async def test_a_worker_that_tells_some_logprobs_only_breaks_the_protocol(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    call = stack.stub.Generate(sampling(max_tokens=8, logprobs=1), timeout=10)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    stack.pair.step(attempt_id, 1, encode("b"))
    stack.decode.say(step_outputs=session_pb2.StepOutputs(outputs=[output(attempt_id, 0, encode("a"), 1)]))
    assert (await refusal(call)).code() is grpc.StatusCode.INTERNAL


SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}'


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": SCHEMA}, "JSON_SCHEMA", SCHEMA),
    ({"json_object": True}, "JSON_OBJECT", ""),
    ({"regex": "a+"}, "REGEX", "a+"),
    ({"grammar": 'start: "a"'}, "GRAMMAR", 'start: "a"'),
    ({"choice": baton_pb2.Texts(texts=["yes", "nö"])}, "CHOICE", '["yes", "nö"]'),
]


async def test_both_workers_are_told_the_form(stack: Stack) -> None:
    for count, (asked, kind, text) in enumerate(FORMS, 1):
        await stack.generate(max_tokens=2, **asked)
        number: Any = sampling_pb2.StructuredKind.Value(f"STRUCTURED_KIND_{kind}")
        expected = sampling_pb2.StructuredOutput(kind=number, text=text)
        for worker, command in ((stack.prefill, "prefill"), (stack.decode, "start")):
            assert (await worker.received(command, count)).sampling.structured == expected


async def test_a_false_json_object_asks_for_nothing(stack: Stack) -> None:
    await stack.generate(max_tokens=2, json_object=False)
    assert not (await stack.decode.received("start")).sampling.HasField("structured")
