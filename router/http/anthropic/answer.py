"""Answers in Anthropic's format: blocks of reasoning, text and tool calls, in one object or as events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.http.edge.problem import Dialect, Problem
from baton.router.http.stream import PieceWriter, encoded_event
from baton.router.types.response import ChoiceFinished, Delta, FinishReason, Started, Summary, Usage
from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought
from baton.text.output.thoughts import OutputParser
from baton.text.output.tool_calls import arguments_object


@dataclass(slots=True)
class _Block:
    content: dict[str, Any]
    arguments: str = ""  # JSON of a tool call's arguments, as far as received


class AnthropicWriter(PieceWriter):
    """Writer of an answer as an Anthropic message, to which content blocks are appended."""

    def __init__(self, message_id: str, parser: OutputParser) -> None:
        super().__init__(parser)
        self._id = message_id
        self._blocks: list[_Block] = []

    def complete(self) -> dict[str, Any]:
        end, summary = self.ended
        return self._message(end, summary.usage)

    def failed(self, problem: Problem) -> bytes:
        return encoded_event("error", error=problem.content_for(Dialect.ANTHROPIC)["error"])

    def _begin(self, started: Started) -> Iterator[bytes]:
        yield encoded_event("message_start", message=self._message(None, Usage(started.prompt_tokens, 0, 0)))

    def _finish(self, end: ChoiceFinished, summary: Summary) -> Iterator[bytes]:
        yield from self._close()
        yield encoded_event("message_delta", delta=self._stop(end), usage=_usage(summary.usage))
        yield encoded_event("message_stop")

    def _add(self, pieces: Sequence[OutputPiece], delta: Delta | None) -> Iterator[bytes]:
        for piece in pieces:
            match piece:
                case str():
                    yield from self._open("text", {"type": "text", "text": ""})
                    yield self._delta("text_delta", "text", piece)
                case Thought(text):
                    yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta("thinking_delta", "thinking", text)
                case CallStart(call_id=call_id, name=name):
                    yield from self._open("", {"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(arguments=arguments):
                    self._blocks[-1].arguments += arguments
                    change = {"type": "input_json_delta", "partial_json": arguments}
                    yield encoded_event("content_block_delta", index=len(self._blocks) - 1, delta=change)

    def _open(self, kind: str, content: dict[str, Any]) -> Iterator[bytes]:
        """Close the last block and open a new one, unless the last block has type `kind`. No block has type ""."""
        if self._blocks and self._blocks[-1].content["type"] == kind:
            return
        yield from self._close()
        yield encoded_event("content_block_start", index=len(self._blocks), content_block=content)
        self._blocks.append(_Block(dict(content)))

    def _close(self) -> Iterator[bytes]:
        if self._blocks:
            yield encoded_event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        self._blocks[-1].content[name] += text
        return encoded_event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def _message(self, end: ChoiceFinished | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "system_fingerprint": self.version,
            "content": [_content(block) for block in self._blocks],
            **self._stop(end),
            "usage": _usage(usage),
        }

    def _stop(self, end: ChoiceFinished | None) -> dict[str, Any]:
        if end is None:
            return {"stop_reason": None, "stop_sequence": None}
        if end.reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif end.stop_text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": end.stop_text}


def _content(block: _Block) -> dict[str, Any]:
    if block.content["type"] != "tool_use":
        return block.content
    return {**block.content, "input": arguments_object(block.arguments)}


def _usage(usage: Usage) -> dict[str, int]:
    """Return the object `usage`. Anthropic's `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
