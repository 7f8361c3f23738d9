"""The OpenAPI document, made from the messages themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAILURES = {
    "400": "the request must be changed; `param` names the field",
    "404": "no such model",
    "408": "the body did not come in",
    "413": "the body is too large",
    "429": "no room; come back after Retry-After",
    "500": "our fault",
    "503": "not ready, or draining",
    "504": "the deadline passed",
}
_GET_FAILURES = {"400": "there are no query parameters; `param` names the first", "503": _FAILURES["503"]}
_PATH_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def openapi_document(
    posts: Mapping[str, type[BaseModel]], gets: Mapping[str, str], streamed: Mapping[str, str], version: str
) -> dict[str, Any]:
    """`posts` are messages by path, `gets` media types by path ("" for no content), `streamed` media types of
    streams by path.
    """
    _, schemas = models_json_schema(
        [(message, "validation") for message in posts.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {path: {"get": _get(path, media)} for path, media in gets.items()}
    for path, message in posts.items():
        paths[path] = {"post": _post(path, message.__name__, [streamed[path]] if path in streamed else [])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR}},
    }


def _post(path: str, message: str, streams: Sequence[str]) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": _reference(message)}}}
    content = {"application/json": {"schema": {"type": "object"}}}
    content |= {media.partition(";")[0]: {} for media in streams}
    responses = {"200": {"description": "the answer", "content": content}, **_failures(_FAILURES)}
    return {"operationId": _operation_id("post", path), "requestBody": body, "responses": responses}


def _get(path: str, media: str) -> dict[str, Any]:
    content: dict[str, Any] = {"content": {media.partition(";")[0]: {"schema": {}}}} if media else {}
    responses = {"200": {"description": "as it is now", **content}, **_failures(_GET_FAILURES)}
    operation: dict[str, Any] = {"operationId": _operation_id("get", path), "responses": responses}
    if "{" in path:
        operation["parameters"] = [_PATH_MODEL]
        responses |= _failures({"404": _FAILURES["404"]})
    return operation


def _failures(descriptions: Mapping[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference("Error")}}
    return {status: {"description": description, "content": content} for status, description in descriptions.items()}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation_id(method: str, path: str) -> str:
    return method + path.replace("/", "_").replace("{", "").replace("}", "").replace(":path", "")
