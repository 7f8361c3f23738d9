"""Bodies of POST /v1/files and /v1/batches. The rules for bodies are in router/http/messages.py."""

from typing import Annotated, Literal

from pydantic import Field

from baton.router.http.dialects import Body
from baton.router.http.responses.bodies import Labels

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Lifetime = Annotated[int, Field(ge=3600, le=2_592_000)]


class ExpiresAfter(Body):
    """Lifetime of a file, from its creation."""

    anchor: Literal["created_at"]
    seconds: Lifetime


class FileForm(Body):
    """Form of POST /v1/files, as multipart/form-data."""

    file: str = Field(description="the file", json_schema_extra={"format": "binary"})
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: Lifetime | None = Field(
        None, alias="expires_after[seconds]", description="lifetime of the file; default: the server's"
    )


class CreateBatch(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Labels | None = Field(None, description="labels, which the batch repeats")
    output_expires_after: ExpiresAfter | None = Field(None, description="lifetime of the results")
