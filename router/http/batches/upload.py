"""Upload of files as multipart/form-data (RFC 7578). A file is written to disk while it arrives."""

import asyncio
import json
from collections.abc import Iterator
from email.parser import HeaderParser
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Receive, Send

from baton.router.http.batches.bodies import FileForm
from baton.router.http.batches.storage import BatchStorage, Upload
from baton.router.http.batches.threads import on_disk
from baton.router.http.edge.endpoint import HttpTransport, PostEndpoint
from baton.router.http.edge.exchange import ClientGone, json_reply, send_reply
from baton.router.http.edge.problem import Problem, refused, unsupported_media_type
from baton.router.http.parse import parse
from baton.router.http.requests import REQUEST_ID_HEADER, HttpCall

FORM = "multipart/form-data"
_MAX_HEAD_BYTES = 4 << 10  # headers of one part
_MAX_NAME = 255  # characters of a name
_MAX_FIELDS_BYTES = 4 << 10  # values of all fields
_MAX_OTHER_BYTES = 64 << 10  # a form without its file
_PIECE_BYTES = 256 << 10  # bytes written in one step
_TIMED_BYTES = 1 << 20  # bytes that must arrive within the time limit of a body


class FormPart(NamedTuple):
    """Beginning of a part. `filename` None: a field."""

    name: str
    filename: str | None


class FormReader:
    """Incremental reader of a form. `is_complete`: the last boundary was read."""

    def __init__(self, content_type: str) -> None:
        """Create a reader. Raises: Problem (415) if the body is no form with a boundary."""
        header = HeaderParser().parsestr(f"content-type: {content_type}")
        boundary = header.get_boundary()
        if header.get_content_type() != FORM or not boundary:
            raise unsupported_media_type("content-type", content_type, f"send {FORM} with a boundary")
        self._delimiter = b"\r\n--" + boundary.encode("latin-1")
        self._rest = bytearray(b"\r\n")  # the first boundary may be at the beginning
        self._in_head = False
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[FormPart | bytes]:
        """Yield the parts that begin in `data`, and the content of each. Raises: Problem."""
        self._rest += data
        while not self.is_complete:
            if not self._in_head:
                at = self._rest.find(self._delimiter)
                content = at if at >= 0 else len(self._rest) - len(self._delimiter) + 1
                if content > 0:
                    yield bytes(self._rest[:content])
                    del self._rest[:content]
                if at < 0:
                    return
                del self._rest[: len(self._delimiter)]
                self._in_head = True
            if self._rest.startswith(b"--"):
                self.is_complete = True
                return
            end = self._rest.find(b"\r\n\r\n")
            if end < 0:
                if len(self._rest) > _MAX_HEAD_BYTES:
                    raise refused("file", f"the headers of a part of the form exceed {_MAX_HEAD_BYTES} bytes")
                return
            yield _part(bytes(self._rest[:end]))
            del self._rest[: end + 4]
            self._in_head = False


def _part(head: bytes) -> FormPart:
    headers = HeaderParser().parsestr(head.decode("utf-8", "replace").lstrip())
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise refused("file", "a part of the form has no name")
    filename = headers.get_filename()
    return FormPart(name[:_MAX_NAME], None if filename is None else filename[:_MAX_NAME])


class ReceivedForm:
    """Form with one file, as far as it was received. `content`: bytes of the file that were not written yet."""

    def __init__(self, reader: FormReader, max_file_bytes: int) -> None:
        self.content = bytearray()
        self.file_bytes = 0
        self.is_received = False
        self._reader = reader
        self._max_file_bytes = max_file_bytes
        self._filename: str | None = None
        self._part: FormPart | None = None
        self._fields: dict[str, bytearray] = {}

    def feed(self, data: bytes) -> None:
        """Process received bytes. Raises: Problem."""
        for each in self._reader.feed(data):
            if isinstance(each, FormPart):
                self._begin(each)
            elif self._part is not None:
                self._add(self._part, each)

    def _begin(self, part: FormPart) -> None:
        self._part = part
        if part.name != "file":
            self._fields[part.name] = bytearray()
        elif self._filename is not None:
            raise refused("file", "is given twice; upload one file per request")
        else:
            self._filename = part.filename or "file"

    def _add(self, part: FormPart, data: bytes) -> None:
        if part.name == "file":
            self.content += data
            self.file_bytes += len(data)
            if self.file_bytes > self._max_file_bytes:
                raise too_large(self._max_file_bytes)
            return
        self._fields[part.name] += data
        if sum(len(name) + len(value) for name, value in self._fields.items()) > _MAX_FIELDS_BYTES:
            raise refused(part.name, f"the fields of the form exceed {_MAX_FIELDS_BYTES} bytes")

    def finish(self) -> FileForm:
        """Return the complete form. Raises: Problem."""
        if not self._reader.is_complete:
            raise refused("file", "the form ends before its last boundary")
        values: dict[str, Any] = {} if self._filename is None else {"file": self._filename}
        for name, raw in self._fields.items():
            text = raw.decode("utf-8", "replace")
            values[name] = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
        return parse(FileForm, json.dumps(values).encode())


def too_large(max_file_bytes: int) -> Problem:
    message = f"file: exceeds {max_file_bytes} bytes (--batch-file-bytes of the router); split it"
    return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, "file", "file_too_large")


class UploadEndpoint(PostEndpoint):
    """ASGI application of POST /v1/files."""

    def __init__(self, storage: BatchStorage, transport: HttpTransport, body_s: float) -> None:
        """Create the application. `body_s`: time limit for each MiB of a form, in seconds."""
        super().__init__(transport)
        self._storage = storage
        self._body_s = body_s

    async def _handle(self, headers: Headers, call: HttpCall, receive: Receive, send: Send) -> None:
        tenant, most = call.caller.tenant, self._storage.bounds.file_bytes
        received: ReceivedForm | None = None
        try:
            received = ReceivedForm(FormReader(headers.get("content-type", "")), most)
            size = int(stated) if (stated := headers.get("content-length", "")).isdecimal() else most
            if size > most + _MAX_OTHER_BYTES:
                raise too_large(most)
            upload = await on_disk(self._storage.begin_upload, tenant, size)
            try:
                await self._receive(received, receive, upload)
                form = received.finish()
                file = await on_disk(self._storage.store, upload, form.file, form.seconds)
            finally:
                self._storage.end_upload(tenant, size, upload)
        except Problem as problem:
            problem.ends_connection = received is None or not received.is_received
            raise
        sent = {REQUEST_ID_HEADER: call.request_id}
        await send_reply(json_reply(file.shown), send, sent)

    async def _receive(self, form: ReceivedForm, receive: Receive, upload: Upload) -> None:
        """Receive a form and write its file. Raises: Problem, ClientGone."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._body_s) as limit:
                timed_bytes = 0
                while not form.is_received:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    form.is_received = not event.get("more_body", False)
                    timed_bytes += len(event.get("body", b""))
                    form.feed(event.get("body", b""))
                    if len(form.content) >= _PIECE_BYTES or form.is_received:
                        written, form.content = bytes(form.content), bytearray()
                        await on_disk(upload.write, written)
                    if timed_bytes >= _TIMED_BYTES:
                        timed_bytes = 0
                        limit.reschedule(loop.time() + self._body_s)
        except TimeoutError:
            message = f"a MiB of the body did not arrive within {self._body_s:g} s (--http-body-s)"
            raise Problem(HTTPStatus.REQUEST_TIMEOUT, message) from None
