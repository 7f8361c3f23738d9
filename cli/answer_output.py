"""How an answer is shown: as text while it streams, or as one JSON object per event."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Protocol, TextIO

from cli.rounding import round_milliseconds
from client import BatonClientError, Delta, Event, Finished, InvalidRequest, PromptPart, Started, Timings, Usage


class AnswerOutput(Protocol):
    def show(self, event: Event) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: BatonClientError) -> None: ...


class TextOutput:
    """Streams a single choice; several are shown whole, one after another, since they come interleaved."""

    def __init__(self, choices: int, output: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._errors = errors or sys.stderr
        self._texts: dict[int, list[str]] | None = {} if choices > 1 else None
        self._prompt = ""  # to stand before each of several choices
        self.text = ""

    def show(self, event: Event) -> None:
        if isinstance(event, PromptPart):
            if self._texts is None:
                self._output.write(event.text)
            self._prompt += event.text
        elif isinstance(event, Delta):
            if self._texts is None:
                self.text += event.text
                self._output.write(event.text)
                self._output.flush()
            else:
                self._texts.setdefault(event.index, []).append(event.text)
        elif isinstance(event, Finished) and self._texts is not None:
            self._output.write(f"[{event.index}] {self._prompt}{''.join(self._texts.get(event.index, []))}\n")
            self._output.flush()

    def end(self) -> None:
        if self._texts is None:
            self._output.write("\n")
            self._output.flush()

    def fail(self, error: BatonClientError) -> None:
        if self.text:
            self.end()
        field = error.field if isinstance(error, InvalidRequest) else None
        # Messages of the server begin with the field by themselves.
        prefix = f"{field}: " if field and not error.message.startswith(field) else ""
        self._errors.write(f"baton: {error.code.name}: {prefix}{error.message}\n")


class JsonOutput:
    """The format that scripts read: `event` is started, prompt, delta, finished or error."""

    def __init__(self, output: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._errors = errors or sys.stderr

    def show(self, event: Event) -> None:
        self._write(event_as_object(event))

    def end(self) -> None:
        """Every line is out already."""

    def fail(self, error: BatonClientError) -> None:
        field = error.field if isinstance(error, InvalidRequest) else None
        self._write(
            {
                "event": "error",
                "code": error.code.name,
                "message": error.message,
                "field": field,
                "reason": error.reason,
            }
        )
        self._errors.write(f"baton: {error.code.name}: {error.message}\n")

    def _write(self, content: dict[str, object]) -> None:
        self._output.write(json.dumps(content, ensure_ascii=False) + "\n")
        self._output.flush()


def event_as_object(event: Event) -> dict[str, object]:
    """Usage and timings are there only on the last `finished`, `logprobs` only where they were asked for."""
    if isinstance(event, Started):
        started = {"event": "started", **asdict(event)}
        del started["resume_token"]  # its holder may take the stream over
        return started
    if isinstance(event, PromptPart):
        part = {"event": "prompt", **asdict(event)}
        if event.logprobs is None:
            del part["logprobs"]
        return part
    if isinstance(event, Delta):
        delta = {"event": "delta", **asdict(event)}
        if event.logprobs is None:
            del delta["logprobs"]
        return delta
    content: dict[str, object] = {
        "event": "finished",
        "index": event.index,
        "finish_reason": event.reason.value,
        "matched_stop": event.matched_stop,
    }
    if event.usage is not None:
        content["usage"] = asdict(event.usage)
    if event.timings is not None:
        content["timings"] = round_milliseconds(asdict(event.timings))
    return content


def show_answer(events: Iterable[Event], output: AnswerOutput, timing: TextIO | None = None) -> bool:
    """Shows an answer to its end; False where it failed, which is shown too. `timing` gets a line of figures."""
    last: Event | None = None
    try:
        for event in events:
            output.show(event)
            last = event
    except BatonClientError as error:
        output.fail(error)
        return False
    output.end()
    if timing is not None and isinstance(last, Finished) and last.usage is not None and last.timings is not None:
        timing.write(timing_line(last.usage, last.timings) + "\n")
    return True


def timing_line(usage: Usage, timings: Timings) -> str:
    """The rate is that of the tokens after the first one."""
    parts = [f"TTFT {timings.ttft_ms:.0f} ms"]
    decoding_ms = timings.total_ms - timings.ttft_ms
    if usage.completion_tokens > 1 and decoding_ms >= 1:
        parts.append(f"{(usage.completion_tokens - 1) * 1e3 / decoding_ms:.1f} tokens/s")
    parts.append(f"{usage.completion_tokens} tokens")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    return " · ".join(parts)
