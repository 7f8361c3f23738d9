"""Routes under /v1/files and /v1/batches: OpenAI's files and batches."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from starlette.types import Scope

from baton.router.dispatcher import Dispatcher
from baton.router.http.batches.bodies import CreateBatch
from baton.router.http.batches.storage import BATCH_PURPOSE, RESULT_PURPOSE, BatchStorage
from baton.router.http.batches.threads import on_disk
from baton.router.http.batches.upload import UploadEndpoint
from baton.router.http.edge.endpoint import HttpTransport, caller_of
from baton.router.http.edge.exchange import Reply, StreamedReply, json_reply
from baton.router.http.edge.problem import refused
from baton.router.http.requests import HttpCall
from baton.router.http.routes.responses import limit_of

MAX_FILES, MAX_BATCHES, DEFAULT_BATCHES = 10_000, 100, 20
_AFTER: Mapping[str, Any] = {"type": "string", "description": "id of the last object of the page before"}
BATCHES_QUERY: dict[str, Mapping[str, Any]] = {
    "after": _AFTER,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES, "default": DEFAULT_BATCHES},
}
FILES_QUERY: dict[str, Mapping[str, Any]] = {
    "after": _AFTER,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_FILES, "default": MAX_FILES},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "purpose": {"type": "string", "description": f"{BATCH_PURPOSE} or {RESULT_PURPOSE}; no file has another purpose"},
}
"""Schemas of the query parameters of lists, for the OpenAPI document."""
CONTENT = "application/octet-stream"
_PIECE_BYTES = 256 << 10


class BatchRoutes:
    """Handlers of the routes of files and batches, except uploads."""

    def __init__(self, storage: BatchStorage, body_s: float) -> None:
        """Create the handlers. `body_s`: time limit for each MiB of an upload, in seconds."""
        self._storage = storage
        self._body_s = body_s

    def upload_endpoint(self, transport: HttpTransport) -> UploadEndpoint:
        return UploadEndpoint(self._storage, transport, self._body_s)

    async def files(self, scope: Scope) -> Reply:
        """List the caller's files. Raises: Problem."""
        query = _query(scope)
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise refused("order", "must be asc or desc")
        limit, after = limit_of(query.get("limit"), MAX_FILES, MAX_FILES), query.get("after", "")
        page = await on_disk(self._storage.files, _tenant(scope), after, limit, order == "asc", purpose)
        return json_reply(page.content)

    async def file(self, scope: Scope) -> Reply:
        """Answer GET or DELETE of a file's description. Raises: Problem."""
        name = scope["path_params"]["file_id"]
        if scope["method"] != "DELETE":
            return json_reply((await on_disk(self._storage.file, _tenant(scope), name)).shown)
        await on_disk(self._storage.delete_file, _tenant(scope), name)
        return json_reply({"id": name, "object": "file", "deleted": True})

    async def content(self, scope: Scope) -> Reply:
        """Return the content of a file. Raises: Problem."""
        file = await on_disk(self._storage.file, _tenant(scope), scope["path_params"]["file_id"])
        opened = await on_disk(Path.open, self._storage.content_path(_tenant(scope), file.id), "rb")
        return StreamedReply(_pieces(opened), CONTENT)

    async def create(self, dispatcher: Dispatcher, message: CreateBatch, call: HttpCall) -> Reply:
        """Create a batch, which a router then runs. Raises: Problem."""
        lifetime = message.output_expires_after
        batch = await on_disk(
            self._storage.create,
            call.caller.tenant,
            message.input_file_id,
            message.endpoint,
            message.metadata,
            None if lifetime is None else lifetime.seconds,
        )
        return json_reply(batch.shown)

    async def batches(self, scope: Scope) -> Reply:
        """List the caller's batches, newest first. Raises: Problem."""
        query = _query(scope)
        limit = limit_of(query.get("limit"), DEFAULT_BATCHES, MAX_BATCHES)
        page = await on_disk(self._storage.batches, _tenant(scope), query.get("after", ""), limit)
        return json_reply(page.content)

    async def batch(self, scope: Scope) -> Reply:
        """Describe a batch. Raises: Problem."""
        return json_reply((await on_disk(self._storage.batch, _tenant(scope), _batch_id(scope))).shown)

    async def cancel(self, scope: Scope) -> Reply:
        """Cancel a batch. Raises: Problem."""
        return json_reply((await on_disk(self._storage.cancel, _tenant(scope), _batch_id(scope))).shown)


def _tenant(scope: Scope) -> str:
    return caller_of(scope).tenant


def _batch_id(scope: Scope) -> str:
    batch_id: str = scope["path_params"]["batch_id"]
    return batch_id


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with file:
        yield b""  # sends the head, also of an empty file
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
