"""Answers of gRPC's chats in parts: the same events however a text is cut, and after any break the rest of them."""

import pytest
from google.protobuf.message import Message

from baton.protos import baton_pb2
from baton.router.public.chat import ReadChat
from baton.router.public.chat_wire import Parts
from baton.router.types.request import GenerationRequest, Operation
from baton.router.types.response import Delta, FinishReason
from baton.text.output.formats.choose import FORMATS
from baton.text.output.thoughts import OutputParser, ThoughtParser
from tests.text.output.golden_streams import Golden, goldens

GOLDENS = goldens()
WIDTHS = (1, 3, 7)


def parts_of(golden: Golden, received: list[baton_pb2.ReceivedChoice] | None = None) -> Parts:
    tagged = FORMATS[golden.format]
    thoughts = None if tagged.has_channels else ThoughtParser(opened=False)
    chat = ReadChat(
        GenerationRequest(Operation.CHAT, None), lambda: OutputParser(thoughts, tagged.reader(golden.tools))
    )
    return Parts(chat, received or [])


def written(parts: Parts, text: str, width: int) -> list[Message | Delta]:
    """A token for each piece of that width."""
    events = list[Message | Delta]()
    for place, begin in enumerate(range(0, len(text), width)):
        events += parts.of(Delta(0, place, (place,), text[begin : begin + width]))
    return [*events, *parts.rest(0)]


def seen_by_client(events: list[Message | Delta]) -> list[tuple[str, str]]:
    """Neighbours of one kind are one; ids of calls are drawn."""
    found = list[tuple[str, str]]()
    for event in events:
        match event:
            case Delta():
                kind, text = "text", event.text
            case baton_pb2.ChatResponse() if event.WhichOneof("event") == "thought":
                kind, text = "thought", event.thought.text
            case baton_pb2.ChatResponse() if event.WhichOneof("event") == "call":
                kind, text = f"call {event.call.call}", event.call.arguments
            case baton_pb2.ChatResponse():
                kind, text = f"begins {event.call_begins.call}", event.call_begins.name
            case _:
                raise AssertionError(event)
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        elif text:
            found.append((kind, text))
    return found


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_events_are_the_same_however_a_text_is_cut(golden: Golden) -> None:
    whole = seen_by_client(written(parts_of(golden), golden.text, len(golden.text)))
    for width in WIDTHS:
        assert seen_by_client(written(parts_of(golden), golden.text, width)) == whole, width
    for cut in range(1, len(golden.text)):
        parts = parts_of(golden)
        events = [*parts.of(Delta(0, 0, (0,), golden.text[:cut])), *parts.of(Delta(0, 1, (1,), golden.text[cut:]))]
        assert seen_by_client([*events, *parts.rest(0)]) == whole, cut
    calls = [text for kind, text in whole if kind.startswith("begins")]
    assert calls == [kind for kind, _ in golden.events if kind not in ("text", "thought")]


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_broken_stream_resumes_after_received_events(golden: Golden) -> None:
    events = written(parts_of(golden), golden.text, 3)
    whole = seen_by_client(events)
    for cut in range(0, len(events), 2):
        had = events[:cut]
        tokens = [token for each in had if isinstance(each, Delta) for token in each.token_ids]
        sizes = [
            len((each.text if isinstance(each, Delta) else each.thought.text + each.call.arguments).encode())
            for each in had
            if isinstance(each, Delta | baton_pb2.ChatResponse)
        ]
        begun = sum(isinstance(each, baton_pb2.ChatResponse) and each.HasField("call_begins") for each in had)
        received = baton_pb2.ReceivedChoice(token_ids=tokens, text_bytes=sum(sizes), calls=begun)
        parts, rest = parts_of(golden, [received]), list[Message | Delta]()
        for place, begin in enumerate(range(0, len(golden.text), 5)):  # another worker's pieces are others
            new = (place,) if place >= len(tokens) else ()
            rest += parts.of(Delta(0, place, new, golden.text[begin : begin + 5]))
        rest += parts.rest(0)
        assert seen_by_client([*had, *rest]) == whole, cut


def test_choice_that_the_client_has_is_not_sent_again() -> None:
    parts = parts_of(GOLDENS[0], [baton_pb2.ReceivedChoice(index=0, token_ids=[1], text_bytes=1, finished=True)])
    assert list(parts.of(Delta(0, 0, (), "text"))) == []


def test_last_end_says_that_functions_are_called_and_how_much_was_thought() -> None:
    golden = next(each for each in GOLDENS if each.format == "hermes")
    parts = parts_of(golden)
    written(parts, "<think>a</think>" + golden.text, 1)
    finished = baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP, usage=baton_pb2.Usage(completion_tokens=9))

    parts.end(finished, FinishReason.STOP)

    assert finished.reason == baton_pb2.FINISH_REASON_TOOL_CALLS
    assert finished.usage.reasoning_tokens == len("<think>a</think>")
