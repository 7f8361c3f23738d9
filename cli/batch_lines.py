"""One line of a batch file: read, checked, and its answer written. The format is OpenAI's, or only its body."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import RequestOutput, SamplingParams

NUMBERS = {
    "temperature": (int, float),
    "top_p": (int, float),
    "min_p": (int, float),
    "typical_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "repetition_penalty": (int, float),
    "top_k": (int,),
    "n": (int,),
    "seed": (int,),
    "max_tokens": (int,),
    "min_tokens": (int,),
}
OTHERS: dict[str, tuple[type, ...]] = {
    "stop": (str, list),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "skip_special_tokens": (bool,),
    "include_stop_str_in_output": (bool,),
    "allowed_token_ids": (list,),
    "bad_words": (list,),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line. `custom_id` is unique within its file; `body` is not checked yet."""

    custom_id: str
    body: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body


def read_line(text: str, number: int) -> BatchRequest:
    """Line `number` (from 1) of the input. Raises: ValueError for what is no request at all."""
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise ValueError(f"line {number} is not a JSON object")
    body = line.get("body", line)
    custom_id = line.get("custom_id", f"line-{number}")
    if not isinstance(body, dict) or not isinstance(custom_id, str):
        raise ValueError(f"line {number}: body must be an object and custom_id a text")
    return BatchRequest(custom_id, body)


def sampling_of(request: BatchRequest) -> "SamplingParams":
    """Raises: ValueError, naming the field. A request without a seed gets one that only its id decides."""
    from engine import SamplingParams

    given: dict[str, Any] = {"seed": int.from_bytes(hashlib.sha256(request.custom_id.encode()).digest()[:8], "little")}
    if request.is_chat:
        given["max_tokens"] = None  # as in OpenAI's API: until the model ends it
    body = dict(request.body)
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    for name, types in (*NUMBERS.items(), *OTHERS.items()):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{name} is {value!r}; it must be {' or '.join(kind.__name__ for kind in types)}")
        given[name] = value
    if body.get("logit_bias"):
        given["logit_bias"] = {int(token_id): float(bias) for token_id, bias in body["logit_bias"].items()}
    return SamplingParams(**given)


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


def error_line(request: BatchRequest, message: str) -> dict[str, Any]:
    """The line of a request that was refused. It is not tried again."""
    error = {"code": "invalid_request", "message": message}
    return {"id": request.custom_id, "custom_id": request.custom_id, "response": None, "error": error}
