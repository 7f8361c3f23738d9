"""The lines of a batch file: read, and their answers written. The format is OpenAI's, or only a request's body."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

if TYPE_CHECKING:
    from engine import RequestOutput

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETION)
NAMES = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"


class LineRefused(Exception):
    """One line cannot be answered; `param` is the field at fault, where it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line. `custom_id` is unique within its file; `body` is not checked yet; with a `fault` there is none."""

    custom_id: str
    url: str = COMPLETION
    body: Mapping[str, Any] = field(default_factory=dict)
    fault: LineRefused | None = None

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT


def read_lines(content: bytes) -> list[BatchRequest]:
    """One for each line that is not empty. A line that is no request has a fault, and the number of its line as id."""
    texts = enumerate(content.removeprefix(_BOM).split(b"\n"), start=1)
    read = [(number, *_read(text, number)) for number, text in texts if text.strip()]
    given = {custom_id for _, custom_id, _ in read if custom_id is not None}
    seen: set[str] = set()
    requests = []
    for number, custom_id, request in read:
        if custom_id is None or custom_id in seen:
            if custom_id is not None:
                request = BatchRequest("", fault=LineRefused(f"custom_id: {custom_id!r} comes twice", "custom_id"))
            custom_id = next(name for name in _line_names(number) if name not in given)
        seen.add(custom_id)
        requests.append(replace(request, custom_id=custom_id))
    return requests


def _line_names(number: int) -> Iterator[str]:
    name = f"line-{number}"
    while True:
        yield name
        name += "'"


def _read(text: bytes, number: int) -> tuple[str | None, BatchRequest]:
    """The id that the line gives, and the rest."""
    try:
        line = from_json(text)
    except ValueError as error:
        return None, BatchRequest("", fault=LineRefused(f"line {number} is not JSON: {error}"))
    if not isinstance(line, dict):
        return None, BatchRequest("", fault=LineRefused(f"line {number} is not a JSON object"))
    custom_id = line.pop("custom_id", None)
    try:
        if not isinstance(custom_id, str | None):
            raise LineRefused("custom_id: must be a text", "custom_id")
        return custom_id, _request(line)
    except LineRefused as fault:
        return custom_id if isinstance(custom_id, str) else None, BatchRequest("", fault=fault)


def _request(line: dict[str, Any]) -> BatchRequest:
    """Raises: LineRefused."""
    method, url = line.pop("method", "POST"), line.pop("url", None)
    body = line.pop("body", None)
    if body is None:
        body = line
    elif not isinstance(body, dict):
        raise LineRefused("body: must be an object", "body")
    elif line:
        name = next(iter(line))
        near = get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else "fields of the request stand in body"
        raise LineRefused(f"{name}: unknown field; {hint}", name)
    if method != "POST":
        raise LineRefused(f"method: is {method!r}, must be POST", "method")
    if url is None:
        url = CHAT if "messages" in body else COMPLETION
    if url not in URLS:
        raise LineRefused(f"url: {url!r} is not served in a batch, but {' and '.join(URLS)}", "url")
    return BatchRequest("", url, body)


def answer_line(request: BatchRequest, model: str, output: "RequestOutput") -> dict[str, Any]:
    """The line of an answered request."""
    choices = [choice_of(request, completion) for completion in output.outputs]
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    body = {
        "id": request.custom_id,
        "object": "chat.completion" if request.is_chat else "text_completion",
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": request.custom_id, "body": body}
    return {"id": request.custom_id, "custom_id": request.custom_id, "response": response, "error": None}


def choice_of(request: BatchRequest, completion: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"text": completion.text}
    if request.is_chat:
        said = {"message": {"role": "assistant", "content": completion.text}}
    return {"index": completion.index, **said, "finish_reason": completion.finish_reason}


def error_line(request: BatchRequest, refused: LineRefused) -> dict[str, Any]:
    """The line of a request that was refused. It is not tried again."""
    error = {"code": "invalid_request", "message": str(refused), "param": refused.param}
    return {"id": request.custom_id, "custom_id": request.custom_id, "response": None, "error": error}
