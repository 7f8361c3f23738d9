"""Parser of batch files: each line gives a request, or the reason why the line is invalid."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from pydantic_core import from_json

from baton.router.http.parse import place_of

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
URLS = (CHAT, COMPLETION, EMBEDDING)
"""URLs of lines for `baton batch`."""
NAMES = ("custom_id", "method", "url", "body")
BOM = b"\xef\xbb\xbf"


class LineRefused(Exception):
    """Error: a line is invalid. `param`: the invalid field, None if no single field is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Request in a line. `custom_id`: unique in the file. `body`: unchecked; empty if the line is invalid."""

    custom_id: str
    url: str = COMPLETION
    body: Mapping[str, Any] = field(default_factory=dict)
    fault: LineRefused | None = None

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT


def read_lines(content: bytes) -> list[BatchRequest]:
    """Return a request per non-empty line. An invalid one has a `fault`; one without a unique id is named `line-N`."""
    texts = enumerate(content.removeprefix(BOM).split(b"\n"), start=1)
    read = [(number, *read_line(text, number, URLS)) for number, text in texts if text.strip()]
    given = {custom_id for _, custom_id, _ in read if custom_id is not None}
    seen: set[str] = set()
    requests = []
    for number, custom_id, request in read:
        if custom_id is None or custom_id in seen:
            if custom_id is not None:
                request = BatchRequest("", fault=LineRefused(f"custom_id: {custom_id!r} is used twice", "custom_id"))
            custom_id = next(name for name in _line_names(number) if name not in given)
        seen.add(custom_id)
        requests.append(replace(request, custom_id=custom_id))
    return requests


def _line_names(number: int) -> Iterator[str]:
    name = f"line-{number}"
    while True:
        yield name
        name += "'"


def read_line(text: bytes, number: int, urls: Sequence[str]) -> tuple[str | None, BatchRequest]:
    """Return the `custom_id` of a line (None if it has none) and its request, whose URL must be one of `urls`."""
    try:
        line = from_json(text)
    except ValueError as error:
        return None, BatchRequest("", fault=LineRefused(f"line {number} is not JSON{place_of(error)}"))
    if not isinstance(line, dict):
        return None, BatchRequest("", fault=LineRefused(f"line {number} is not a JSON object"))
    custom_id = line.pop("custom_id", None)
    try:
        if not isinstance(custom_id, str | None):
            raise LineRefused("custom_id: must be a string", "custom_id")
        return custom_id, _request(line, urls)
    except LineRefused as fault:
        return custom_id if isinstance(custom_id, str) else None, BatchRequest("", fault=fault)


def _request(line: dict[str, Any], urls: Sequence[str]) -> BatchRequest:
    """Return the request in a line's fields. Raises: LineRefused."""
    method, url = line.pop("method", "POST"), line.pop("url", None)
    body = line.pop("body", None)
    if body is None:
        body = line
    elif not isinstance(body, dict):
        raise LineRefused("body: must be an object", "body")
    elif line:
        name = next(iter(line))
        near = get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else "put fields of the request into body"
        raise LineRefused(f"{name}: unknown field; {hint}", name)
    if method != "POST":
        raise LineRefused(f"method: is {method!r}, must be POST", "method")
    if url is None:
        url = urls[0] if len(urls) == 1 else _url_for(body)
    if url not in urls:
        raise LineRefused(f"url: {url!r} is not supported; use {' or '.join(urls)}", "url")
    return BatchRequest("", url, body)


def _url_for(body: Mapping[str, Any]) -> str:
    return CHAT if "messages" in body else EMBEDDING if "input" in body else COMPLETION
