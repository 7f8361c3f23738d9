"""Parsing of bodies without blocking the event loop: small ones immediately, large ones in a helper process.

No stream gets a token while a body is parsed on the event loop, so that may take at most 2 ms. The helper's result is
read on a thread, in steps of at most 2 ms: its long fields are bytes, which are quickly converted.

The helper sends a packed message: a JSON head that lists the parts that follow; the body in JSON, in which long fields
are empty; and one or more parts (byte strings) for each long field. An error is sent as a head without parts.
"""

import asyncio
import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json

from baton.process.helper import Asks, Buffer, HelperBusy, HelperFailed, answer_frames
from baton.router.http.anthropic.bodies import ANTHROPIC_MESSAGES
from baton.router.http.batches.bodies import CreateBatch
from baton.router.http.edge.problem import Problem, refused, retry_later
from baton.router.http.messages import ADAPTER_MESSAGES, MESSAGES
from baton.router.http.ollama.bodies import OLLAMA_MESSAGES
from baton.router.http.parse import SMALL_BYTES, is_small, json_size, parse
from baton.router.http.responses.bodies import CompactRequest, ResponseRequest
from baton.router.http.vectors.bodies import VECTOR_MESSAGES

Message = TypeVar("Message", bound=BaseModel)

LONG = 1 << 9  # number of elements above which a list is a long field
LONG_TEXT = 1 << 14  # number of characters above which a text, or a list of texts, is a long field
PIECE = 1 << 8  # number of elements of a list, such as messages, that are parsed in one step
_LENGTH_BYTES = 8


class FieldKind(Enum):
    TEXT = "text"  # a text: one part, in UTF-8
    TEXTS = "texts"  # a list of texts: one part per text
    IDS = "ids"  # a list of token ids: one part, with 32 bits per id
    ID_LISTS = "id lists"  # a list of lists of token ids: one part per inner list
    PIECES = "pieces"  # any other list: one part per PIECE elements, as a JSON list


class _LongField(NamedTuple):
    name: str
    kind: FieldKind
    parts: Sequence[Buffer]


def pack(message_type: type[BaseModel], body: bytes) -> list[Buffer]:
    """Parse a body and pack the message, or the error if it is invalid."""
    try:
        parse(message_type, body)
        sent = from_json(body)
        fields = [field for name, value in sent.items() if (field := _field(name, value)) is not None]
    except Problem as problem:
        return _with_head({"problem": [problem.status, problem.message, problem.param, problem.code]}, [])
    for field in fields:
        sent[field.name] = "" if field.kind is FieldKind.TEXT else []
    rest = json.dumps(sent).encode()
    taken = [[each.name, each.kind.value, [len(part) for part in each.parts]] for each in fields]
    return _with_head({"rest": len(rest), "taken": taken}, [rest, *(part for each in fields for part in each.parts)])


def unpack(message_type: type[Message], packed: memoryview) -> Message:
    """Unpack a message. Raises: Problem if an error was packed."""
    parts = _PartReader(packed)
    head = json.loads(bytes(parts.take(int.from_bytes(parts.take(_LENGTH_BYTES), "little"))))
    if "problem" in head:
        status, message, param, code = head["problem"]
        raise Problem(HTTPStatus(status), message, param, code)
    short = message_type.model_validate_json(bytes(parts.take(head["rest"])))
    long: dict[str, Any] = {}
    for name, kind, sizes in head["taken"]:
        given = [parts.take(size) for size in sizes]
        field = message_type.model_fields[name]
        long[name] = _value(FieldKind(kind), given, field.annotation)
    return short.model_copy(update=long)


def _field(name: str, value: Any) -> _LongField | None:
    """Return the parts of a field if it is long; None: it stays in the body. Raises: Problem for invalid token ids."""
    if isinstance(value, str):
        return _LongField(name, FieldKind.TEXT, [value.encode()]) if len(value) > LONG_TEXT else None
    if not isinstance(value, list):
        return None
    kinds = {type(each) for each in value}
    if kinds == {int}:
        return _LongField(name, FieldKind.IDS, [_ids(name, value)]) if len(value) > LONG else None
    if kinds == {str}:
        return _LongField(name, FieldKind.TEXTS, [each.encode() for each in value]) if _is_long(value) else None
    if kinds == {list} and {type(each) for inner in value for each in inner} == {int}:
        if sum(map(len, value)) <= LONG:
            return None
        return _LongField(
            name, FieldKind.ID_LISTS, [_ids(f"{name}[{index}]", each) for index, each in enumerate(value)]
        )
    if len(value) > PIECE:
        pieces = (value[begin : begin + PIECE] for begin in range(0, len(value), PIECE))
        return _LongField(name, FieldKind.PIECES, [json.dumps(piece).encode() for piece in pieces])
    return None


def _is_long(texts: Sequence[str]) -> bool:
    return len(texts) > LONG or sum(map(len, texts)) > LONG_TEXT


def _ids(name: str, values: Sequence[int]) -> bytes:
    """Pack token ids in 32 bits each. Raises: Problem that names the first invalid id."""
    try:
        return array("I", values).tobytes()
    except OverflowError:
        index = next(index for index, value in enumerate(values) if not 0 <= value < 1 << 32)
        raise refused(f"{name}[{index}]", "is not a token id") from None


def _value(kind: FieldKind, parts: Sequence[memoryview], annotation: Any) -> Any:
    match kind:
        case FieldKind.TEXT:
            return str(parts[0], "utf-8")
        case FieldKind.TEXTS:
            return [str(part, "utf-8") for part in parts]
        case FieldKind.IDS:
            return _array(parts[0])
        case FieldKind.ID_LISTS:
            return [_array(part) for part in parts]
        case FieldKind.PIECES:
            return list(_elements(parts, TypeAdapter(annotation)))


def _elements(parts: Sequence[memoryview], adapter: TypeAdapter[list[Any]]) -> Iterator[Any]:
    for part in parts:
        yield from adapter.validate_json(bytes(part))


def _array(part: memoryview) -> Sequence[int]:
    """Return a sequence of integers that creates an int object only for each element that is read."""
    ids = array("I")
    ids.frombytes(part)
    return ids


def _with_head(head: Mapping[str, Any], parts: Sequence[Buffer]) -> list[Buffer]:
    encoded = json.dumps(head).encode()
    return [len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *parts]


class _PartReader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def take(self, size: int) -> memoryview:
        begin, self._position = self._position, self._position + size
        return self._data[begin : self._position]


class Parser:
    """Parser of bodies. It parses large bodies in a helper process. Call `close` at the end."""

    def __init__(self, helper: Asks) -> None:
        """Create the parser. `helper`: process that runs this module."""
        self._helper = helper
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unpack")

    async def parse(self, message_type: type[Message], parts: Sequence[bytes]) -> Message:
        """Parse a body. Raises: Problem that names an invalid field, or has status 503 because the helper failed."""
        if sum(map(len, parts)) <= SMALL_BYTES:
            body = b"".join(parts)
            size = json_size(body)
            if is_small(size) or size.excess is not None:
                return parse(message_type, body)
        try:
            packed = await self._helper.ask([f"{message_type.__name__}\n".encode(), *parts])
        except HelperBusy:
            raise retry_later("too many large bodies are being parsed") from None
        except HelperFailed as error:
            raise retry_later("the process that parses large bodies failed") from error
        return await asyncio.get_running_loop().run_in_executor(self._thread, unpack, message_type, memoryview(packed))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._helper.close()


TYPES = {
    each.__name__: each
    for each in (
        *(*MESSAGES, *ADAPTER_MESSAGES, *ANTHROPIC_MESSAGES, *OLLAMA_MESSAGES, *VECTOR_MESSAGES),
        ResponseRequest,
        CompactRequest,
        CreateBatch,
    )
}


def packed(asked: memoryview) -> Sequence[Buffer]:
    """Answer a request of the router. `asked`: name of a message type, a newline and a body."""
    name, _, body = bytes(asked).partition(b"\n")
    return pack(TYPES[name.decode()], body)


if __name__ == "__main__":
    sys.exit(answer_frames(packed))
