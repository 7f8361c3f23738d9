"""OpenAPI document: routes, schemas of their request bodies and of their answers. Pure."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from baton.router.http.edge.exchange import JSON
from baton.router.http.edge.problem import Dialect, dialect_of

Schema = Mapping[str, Any]


def _object(**properties: Any) -> Schema:
    """Return the schema of an object that requires these properties and may have others."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


_TEXT, _COUNT, _FLAG, _ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}, _object()
_NUMBER = {"type": "number"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERRORS: Mapping[Dialect, tuple[str, Schema]] = {
    Dialect.OPENAI: (
        "Error",
        _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    ),
    Dialect.ANTHROPIC: ("AnthropicError", _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))),
    Dialect.OLLAMA: ("OllamaError", _object(error=_TEXT)),
}
"""Name and schema of an error, by dialect."""

_KEYLESS = ("/health", "/ready")
_GET_FAILURES = {
    "400": "unknown query parameter; the error names it",
    "401": "missing or unknown API key",
    "403": "the API key lacks the permission",
    "404": "unknown model, or unknown response, file or batch of this API key",
    "405": "wrong method; the header Allow lists the right ones",
    "503": "not ready, or draining",
}
_FAILURES = {
    **_GET_FAILURES,
    "400": "invalid request; the error names the field",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is compressed or of another media type",
    "429": "overloaded, or over a limit of the API key; retry after Retry-After seconds",
    "500": "internal error",
    "504": "deadline exceeded",
}
_PATH_NAME = re.compile(r"{(\w+)}")

_QUESTION = [{"role": "user", "content": "What is a block table?"}]
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "A block table is", "max_tokens": 4},
    "/v1/chat/completions": {"messages": _QUESTION, "max_tokens": 4},
    "/v1/messages": {"messages": _QUESTION, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": _QUESTION},
    "/v1/responses": {"input": "What is a block table?", "max_output_tokens": 4},
    "/v1/responses/compact": {"input": "What is a block table?", "max_output_tokens": 4},
    "/api/chat": {"messages": _QUESTION, "options": {"num_predict": 4}, "stream": False},
    "/api/generate": {"prompt": "What is a block table?", "options": {"num_predict": 4}, "stream": False},
    "/api/embed": {"input": ["What is a block table?"], "dimensions": 8},
    "/api/show": {"verbose": False},
    "/generate": {"prompt": "A block table is", "max_tokens": 4},
    "/tokenize": {"prompt": "A block table is"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/embeddings": {"input": ["What is a block table?"], "dimensions": 8},
    "/v1/score": {"text_1": "What is TTFT?", "text_2": ["Time to first token."]},
    "/v1/rerank": {"query": "What is TTFT?", "documents": ["Time to first token."]},
    "/rerank": {"query": "What is TTFT?", "documents": ["Time to first token."]},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/v1/files": {"file": '{"custom_id": "a", "body": {"prompt": "A block table is"}}', "purpose": "batch"},
    "/v1/batches": {
        "input_file_id": "file-0",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
}
"""Example bodies, by path."""
_FORMS = {"/v1/files": "multipart/form-data"}
"""Paths whose bodies are forms."""
_IN_WORDS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths that answer in plain text, for compatibility with vLLM."""

_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_READY = _object(ready=_FLAG, detail=_TEXT)
_READ = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_CHOICE = {"index": _COUNT, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}
_NAMED = _object(name=_TEXT, model=_TEXT, digest=_TEXT, details=_ANY)
_OLLAMA = {"model": _TEXT, "created_at": _TEXT, "done": {"const": True}, "done_reason": _TEXT}


def _choices(kind: str, **choice: Any) -> Schema:
    choices = _list(_object(**_CHOICE, **choice))
    return _object(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=choices, usage=_USAGE)


_RANKS = _object(id=_TEXT, model=_TEXT, results=_list(_object(index=_COUNT, relevance_score=_NUMBER)), usage=_READ)
_ANSWERS: Mapping[str, Schema] = {
    "/v1/completions": _choices("text_completion", text=_TEXT),
    "/v1/chat/completions": _choices("chat.completion", message=_object(role={"const": "assistant"})),
    "/v1/messages": _object(
        id=_TEXT, type={"const": "message"}, model=_TEXT, content=_list(_object(type=_TEXT)), usage=_ANY
    ),
    "/v1/messages/count_tokens": _object(input_tokens=_COUNT),
    "/v1/responses": _object(id=_TEXT, object={"const": "response"}, status=_TEXT, output=_list(_ANY), usage=_ANY),
    "/v1/responses/compact": _object(id=_TEXT, object={"const": "response.compaction"}, output=_list(_ANY), usage=_ANY),
    "/v1/responses/{response_id}": _object(id=_TEXT),
    "/v1/responses/{response_id}/input_items": _object(object={"const": "list"}, data=_list(_ANY), has_more=_FLAG),
    "/v1/embeddings": _object(
        object={"const": "list"}, model=_TEXT, data=_list(_object(index=_COUNT, embedding={})), usage=_READ
    ),
    "/v1/score": _object(id=_TEXT, model=_TEXT, data=_list(_object(index=_COUNT, score=_NUMBER)), usage=_READ),
    "/v1/rerank": _RANKS,
    "/rerank": _RANKS,
    "/api/chat": _object(**_OLLAMA, message=_object(role={"const": "assistant"}, content=_TEXT)),
    "/api/generate": _object(**_OLLAMA, response=_TEXT),
    "/api/embed": _object(
        model=_TEXT, embeddings=_list(_list(_NUMBER)), total_duration=_COUNT, prompt_eval_count=_COUNT
    ),
    "/api/show": _object(template=_TEXT, details=_ANY, model_info=_ANY, capabilities=_list(_TEXT)),
    "/api/tags": _object(models=_list(_NAMED)),
    "/api/ps": _object(models=_list(_NAMED)),
    "/api/version": _object(version=_TEXT),
    "/generate": _object(text=_list(_TEXT)),
    "/tokenize": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    "/detokenize": _object(prompt=_TEXT),
    **dict.fromkeys(("/v1/files", "/v1/batches"), _object(object=_TEXT)),
    "/v1/files/{file_id}": _object(id=_TEXT, object={"const": "file"}),
    **dict.fromkeys(("/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"), _object(id=_TEXT, status=_TEXT)),
    "/v1/models": _object(object={"const": "list"}, data=_list(_MODEL)),
    "/v1/models/{model}": _MODEL,
    "/ready": _READY,
    "/version": _object(version=_TEXT, protocol=_COUNT, oldest_protocol=_COUNT, grpc_port=_COUNT),
    "/page/state": _ANY,
    "/openapi.json": _object(openapi=_TEXT, paths=_ANY),
}
"""Schemas of successful JSON answers, by path."""


def openapi_document(
    posts: Mapping[str, type[BaseModel]],
    gets: Mapping[str, Sequence[str]],
    streamed: Mapping[str, str],
    version: str,
    parameters: Mapping[str, Schema],
    deletes: Sequence[str],
    bodiless: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the OpenAPI document.

    By path: `posts` has the types of bodies, `gets` the media types of answers (empty: no content), `streamed` the
    media types of streams, `parameters` the schemas of query parameters. `deletes`: paths with DELETE; `bodiless`:
    paths with a POST that has no body.
    """
    paths: dict[str, Any] = {}
    for path, media in gets.items():
        paths[path] = {"get": _get("get", path, media, parameters.get(path, {}))}
    for path, message in posts.items():
        paths.setdefault(path, {})["post"] = _post(path, message.__name__, [streamed[path]] if path in streamed else [])
    for path in deletes:
        paths[path]["delete"] = _get("delete", path, [JSON], {})
    for path in bodiless:
        paths[path] = {"post": _get("post", path, [JSON], {})}
        paths[path]["post"]["responses"] |= _failures(path, {"409": "too late: its status is final"})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {"schemas": {**_schemas(tuple(posts.values())), **dict(_ERRORS.values())}},
    }


@cache
def _schemas(messages: Sequence[type[BaseModel]]) -> Schema:
    """Return the JSON schemas of all bodies, by name. They are cached: generating them takes 0.5 s of CPU time."""
    _, schemas = models_json_schema(
        [(message, "validation") for message in messages], ref_template="#/components/schemas/{model}"
    )
    found: Schema = schemas.get("$defs", {})
    return found


def _post(path: str, message: str, streams: Sequence[str]) -> dict[str, Any]:
    asked = {"schema": _reference(message), "example": EXAMPLES[path]}
    body = {"required": True, "content": {_FORMS.get(path, "application/json"): asked}}
    whole = {"text/plain": {"schema": _TEXT}} if path in _IN_WORDS else {"application/json": {"schema": _ANSWERS[path]}}
    content: dict[str, Any] = dict(whole)
    content |= {media.partition(";")[0]: {} for media in streams}
    responses = {"200": {"description": "the answer", "content": content}, **_failures(path, _FAILURES)}
    return {"operationId": _operation_id("post", path), "requestBody": body, "responses": responses}


def _get(method: str, path: str, media: Sequence[str], query: Schema) -> dict[str, Any]:
    kinds = [each.partition(";")[0] for each in media]
    content: dict[str, Any] = {"content": {each: {"schema": _ANSWERS.get(path, {})} for each in kinds}} if kinds else {}
    responses = {"200": {"description": "the current state", **content}, **_failures(path, _GET_FAILURES)}
    operation: dict[str, Any] = {"operationId": _operation_id(method, path), "responses": responses}
    parameters = [_parameter("path", name, {"type": "string", "minLength": 1}) for name in _PATH_NAME.findall(path)]
    parameters += [_parameter("query", name, schema) for name, schema in query.items()]
    if parameters:
        operation["parameters"] = parameters
    if "{" not in path:
        del responses["404"]
    if path in _KEYLESS:
        del responses["401"], responses["403"]
    if path == "/ready":
        responses["503"]["content"] = {"application/json": {"schema": _READY}}
    return operation


def _parameter(place: str, name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _failures(path: str, descriptions: Mapping[str, str]) -> dict[str, Any]:
    name, _ = _ERRORS[dialect_of(path)]
    return {
        status: {"description": description, "content": {"application/json": {"schema": _reference(name)}}}
        for status, description in descriptions.items()
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation_id(method: str, path: str) -> str:
    return method + path.replace("/", "_").replace("{", "").replace("}", "").replace(":path", "")
