"""The process that parses large bodies, so that the gateway's event loop need not: see gateway/parsing/parser.py."""

import sys
from collections.abc import Sequence

from baton.gateway.messages.chat import ChatRequest
from baton.gateway.messages.completions import CompletionRequest
from baton.gateway.messages.responses import ResponseRequest
from baton.gateway.messages.simple import DetokenizeRequest, GenerateRequest, TokenizeRequest
from baton.gateway.parsing.packing import pack
from baton.service.helper_loop import Buffer, answer_frames

TYPES = {
    each.__name__: each
    for each in (ChatRequest, CompletionRequest, ResponseRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest)
}


def packed(asked: memoryview) -> Sequence[Buffer]:
    """The name of a type of messages, a line end, and a body."""
    name, _, body = bytes(asked).partition(b"\n")
    return pack(TYPES[name.decode()], body)


if __name__ == "__main__":
    sys.exit(answer_frames(packed))
