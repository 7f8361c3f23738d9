"""The session whose KV is kept: whose it is, what it may say, and what workers get of it."""

from dataclasses import replace

import pytest

from baton.process.errors import InvalidArgument
from baton.protos import baton_pb2
from baton.router.fleet.wire import kept_session_message
from baton.router.model.defaults import GenerationDefaults
from baton.router.model.validation import DrawnValues, validate
from baton.router.public.service import chat_request, generate_request
from baton.router.types.request import GenerationRequest, Operation, TextPrompt, ValidRequest
from baton.router.types.session import ID_BYTES, OWNER_BYTES, kept_session
from tests.router.conftest import Stack
from tests.router.test_traces import spans_of

ASKED = GenerationRequest(Operation.GENERATE, TextPrompt("a"))


def checked(**fields: object) -> ValidRequest:
    return validate(replace(ASKED, **fields), GenerationDefaults(), 100, 64, DrawnValues("r", 1))  # type: ignore[arg-type]


def test_two_keys_or_two_salts_with_one_name_have_two_sessions() -> None:
    callers: list[dict[str, object]] = [
        {},
        {"key_salt": b"k"},
        {"cache_salt": "k"},
        {"key_salt": b"k", "cache_salt": "k"},
        {"tenant": "k"},
        {"tenant": "k", "cache_salt": "k"},
    ]
    made = [checked(session_id="s", **caller).kept_session for caller in callers]
    assert len({each.id for each in made if each is not None}) == len(callers)


def test_all_sessions_of_a_key_have_one_owner_for_any_salt() -> None:
    of_key = [kept_session(name, "ann", b"key", salt) for name, salt in (("a", ""), ("b", ""), ("a", "x"))]
    of_salts = [kept_session("a", "", b"", salt) for salt in ("", "x")]
    assert len({each.owner for each in of_key if each is not None}) == 1
    assert len({each.owner for each in of_salts if each is not None}) == 2
    lengths = {(len(each.id), len(each.owner)) for each in of_key if each is not None}
    assert lengths == {(ID_BYTES, OWNER_BYTES)}


def test_request_without_a_session_name_has_no_session() -> None:
    assert checked().kept_session is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": "s", "keep_for_s": -0.5}, "keep_for_s"),
        ({"session_id": "s", "keep_for_s": 86_400.5}, "keep_for_s"),
        ({"session_id": "s", "keep_for_s": float("nan")}, "keep_for_s"),
        ({"keep_for_s": 1.0}, "keep_for_s"),
        ({"done": True}, "done"),
    ],
)
def test_impossible_field_is_refused_by_its_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        checked(**fields)
    assert refusal.value.field == field


def test_fields_of_both_calls_over_grpc_arrive() -> None:
    generate = generate_request(baton_pb2.GenerateRequest(text="a", session_id="s", keep_for_s=0.0, done=True))
    chat = chat_request(baton_pb2.ChatRequest(session_id="s", keep_for_s=0.0, done=True))
    for request in (generate, chat):
        assert (request.session_id, request.keep_for_s, request.done) == ("s", 0.0, True)
    assert generate_request(baton_pb2.GenerateRequest(text="a")).keep_for_s is None


def test_worker_does_not_learn_the_clients_name_of_it() -> None:
    message = kept_session_message(kept_session("agent-of-ann", "", b"", "", keep_for_s=2.0, done=True))
    assert message is not None
    assert (message.keep_for_s, message.done, message.name) == (2.0, True, "")
    assert b"ann" not in message.SerializeToString()


@pytest.mark.parametrize(("session_id", "header"), [("agent-7", ""), ("", "agent-7")])
async def test_both_workers_and_the_trace_have_the_session_of_a_request(
    stack: Stack, session_id: str, header: str
) -> None:
    await stack.ready()
    sampling = baton_pb2.SamplingParams(max_tokens=2)
    asked = baton_pb2.GenerateRequest(text="hello", sampling=sampling, session_id=session_id, done=True)
    metadata = (("x-session-id", header),) if header else ()
    async for _ in stack.stub.Generate(asked, timeout=10, metadata=metadata):
        pass
    kept = kept_session("agent-7", "", b"", "")
    assert kept is not None
    for command in (await stack.prefill.received("prefill"), await stack.decode.received("start")):
        assert (command.kept_session.id, command.kept_session.owner) == (kept.id, kept.owner)
        assert command.kept_session.done and not command.kept_session.HasField("keep_for_s")
    root = (await spans_of(stack))["text_completion tiny"]
    assert root.attributes["gen_ai.conversation.id"] == "agent-7"


async def test_request_of_no_session_sends_none(stack: Stack) -> None:
    await stack.generate(max_tokens=2)
    assert not (await stack.prefill.received("prefill")).HasField("kept_session")
    assert not (await stack.decode.received("start")).HasField("kept_session")
