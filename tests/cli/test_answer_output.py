"""An answer at the terminal, and for scripts."""

import io
import json

from baton.cli.ask import JsonOutput, TextOutput, show_answer
from baton.client import (
    Alternative,
    BatonClientError,
    Busy,
    Delta,
    ErrorDetails,
    Event,
    Finished,
    FinishReason,
    InvalidRequest,
    PromptPart,
    ServerError,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)

TIMINGS = Timings(5.0, 9.1234567, 1.0, 0.1, 0.2, 3.0, 0.7, 0.4, 0.1, 0.9, 4096, "shared_memory", 11, 12)
STARTED = Started("r1", "tiny", 3, 7, model_version="0f")
LAST = Finished(0, FinishReason.LENGTH, None, Usage(3, 2, 0), TIMINGS)


def text_of(events: list[Event], choices: int = 1) -> str:
    output = io.StringIO()
    assert show_answer(events, TextOutput(choices, output, io.StringIO()))
    return output.getvalue()


def failing(events: list[Event], error: BatonClientError) -> "list[Event]":
    def generate():  # type: ignore[no-untyped-def]
        yield from events
        raise error

    return generate()  # type: ignore[no-any-return]


def test_text_streams_and_ends_with_a_line_end() -> None:
    assert text_of([STARTED, Delta(0, 0, (1,), "Hel"), Delta(0, 1, (2,), "lo"), LAST]) == "Hello\n"


def test_several_choices_are_shown_one_after_another() -> None:
    events = [
        STARTED,
        Delta(0, 0, (1,), "a"),
        Delta(1, 0, (2,), "x"),
        Delta(0, 1, (3,), "b"),
        Finished(1, FinishReason.STOP),
        LAST,
    ]
    assert text_of(events, choices=2) == "[1] x\n[0] ab\n"


def test_json_has_one_object_per_event() -> None:
    output = io.StringIO()
    assert show_answer([STARTED, Delta(0, 0, (1, 2), "é"), LAST], JsonOutput(output, io.StringIO()))
    started, delta, finished = map(json.loads, output.getvalue().splitlines())
    shown = {"request_id": "r1", "model": "tiny", "prompt_tokens": 3, "seed": 7, "model_version": "0f"}
    assert started == {"event": "started", **shown}
    assert delta == {"event": "delta", "index": 0, "offset": 0, "token_ids": [1, 2], "text": "é"}
    assert (finished["event"], finished["index"], finished["finish_reason"]) == ("finished", 0, "length")
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0, "reasoning_tokens": None}
    assert finished["usage"] == usage
    timings = finished["timings"]
    assert (timings["ttft_ms"], timings["total_ms"], timings["transfer_bytes"]) == (5.0, 9.123, 4096)


def test_json_has_the_logprobs_that_were_asked_for() -> None:
    output = io.StringIO()
    shown = (TokenLogprob(1, -0.5, (Alternative(2, -0.25),)),)
    show_answer([STARTED, Delta(0, 0, (1,), "a", shown), LAST], JsonOutput(output, io.StringIO()))
    delta = json.loads(output.getvalue().splitlines()[1])
    assert delta["logprobs"] == [{"token_id": 1, "logprob": -0.5, "top": [{"token_id": 2, "logprob": -0.25}]}]


def test_usage_and_timings_are_only_on_the_last_finished() -> None:
    output = io.StringIO()
    show_answer([STARTED, Finished(1, FinishReason.STOP, "end"), LAST], JsonOutput(output, io.StringIO()))
    first = json.loads(output.getvalue().splitlines()[1])
    assert first == {"event": "finished", "index": 1, "finish_reason": "stop", "matched_stop": "end"}


def test_text_output_error_goes_to_stderr_with_code_and_field() -> None:
    errors = io.StringIO()
    error = InvalidRequest("must be finite", ErrorDetails(field="sampling.temperature"))
    assert not show_answer(failing([], error), TextOutput(1, io.StringIO(), errors))
    assert errors.getvalue() == "baton: INVALID_ARGUMENT: sampling.temperature: must be finite\n"


def test_json_output_error_is_an_event() -> None:
    output, errors = io.StringIO(), io.StringIO()
    assert not show_answer(failing([STARTED], Busy("full", ErrorDetails(reason="NO_ROOM"))), JsonOutput(output, errors))
    assert json.loads(output.getvalue().splitlines()[1]) == {
        "event": "error",
        "code": "RESOURCE_EXHAUSTED",
        "message": "full",
        "field": None,
        "reason": "NO_ROOM",
    }
    assert errors.getvalue() == "baton: RESOURCE_EXHAUSTED: full\n"


def test_text_output_error_after_text_begins_a_new_line() -> None:
    output, errors = io.StringIO(), io.StringIO()
    show_answer(failing([STARTED, Delta(0, 0, (1,), "Hel")], ServerError("broken")), TextOutput(1, output, errors))
    assert (output.getvalue(), errors.getvalue()) == ("Hel\n", "baton: INTERNAL: broken\n")


def test_text_output_echoed_prompt_begins_each_choice() -> None:
    part = PromptPart(0, (7, 8), "Say")
    assert text_of([STARTED, part, Delta(0, 0, (1,), " hi"), LAST]) == "Say hi\n"
    events = [STARTED, part, Delta(1, 0, (2,), " x"), Finished(1, FinishReason.STOP), Delta(0, 0, (1,), " y"), LAST]
    assert text_of(events, choices=2) == "[1] Say x\n[0] Say y\n"


def test_json_has_the_parts_of_the_prompt() -> None:
    output = io.StringIO()
    shown = (TokenLogprob(8, -0.5, ()),)
    show_answer([STARTED, PromptPart(0, (7,), "Say"), PromptPart(1, (8,), "", shown), LAST], JsonOutput(output))
    first, second = map(json.loads, output.getvalue().splitlines()[1:3])
    assert first == {"event": "prompt", "offset": 0, "token_ids": [7], "text": "Say"}
    assert second["logprobs"] == [{"token_id": 8, "logprob": -0.5, "top": []}]
