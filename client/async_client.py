"""The asyncio client. Its twin is sync_client.py."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from baton.client import requests, responses
from baton.client.answer import completion_from
from baton.client.async_connection import AsyncConnection
from baton.client.channel import DEFAULT_ADMIN_TARGET, DEFAULT_TARGET, Security
from baton.client.cluster import ClusterStatus, RequestExplanation, Role, explanation_from, role_number
from baton.client.requests import GenerateOptions
from baton.client.retry import Recovery, RetryPolicy
from baton.client.types import Completion, Event, Message, Model
from baton.protos import admin_pb2, admin_pb2_grpc, baton_pb2, baton_pb2_grpc


class _AsyncClient:
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AsyncBatonClient(_AsyncClient):
    """Talks to a router. Connects on the first call and then belongs to that event loop.

    `target` is host:port, several of one cluster with commas between them or as a sequence: it stays with one until
    that is gone. A stream that breaks is resumed there, or at another one, where it broke.
    `timeout_s` bounds each call, retries included; None leaves it to the server. `tls`: True, or a file (PEM) with the
    certificate authorities to trust. Raises: BatonClientError (errors.py).
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        api_key: str | None = None,
        tls: bool | Path = False,
    ) -> None:
        security = Security(api_key, tls)
        super().__init__(
            AsyncConnection(target, baton_pb2_grpc.BatonServiceStub, retry or RetryPolicy(), timeout_s, security)
        )

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """Continues a text, or token ids.

        The call begins with the first event that is awaited. `aclose()`, or cancelling the task that reads, cancels it;
        a caller that leaves the loop early should read under `contextlib.aclosing`.
        """
        return self._events("Generate", requests.generate_request(prompt, options), options)

    def chat(
        self, messages: Sequence[Message | Mapping[str, str]], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """As `generate`, for a conversation, oldest message first."""
        return self._events("Chat", requests.chat_request(messages, options), options)

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, collected."""
        async with aclosing(self.generate(prompt, **options)) as events:
            return completion_from([event async for event in events])

    async def complete_chat(
        self, messages: Sequence[Message | Mapping[str, str]], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """`chat`, collected."""
        async with aclosing(self.chat(messages, **options)) as events:
            return completion_from([event async for event in events])

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str = "", timeout_s: float | None = None
    ) -> tuple[int, ...]:
        request = requests.tokenize_request(text, add_special_tokens, model)
        response = await self._connection.unary("Tokenize", request, timeout_s)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        request = requests.detokenize_request(token_ids, skip_special_tokens, model)
        text: str = (await self._connection.unary("Detokenize", request, timeout_s)).text
        return text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        response = await self._connection.unary("ListModels", baton_pb2.ListModelsRequest(), timeout_s)
        return tuple(responses.model_from(model) for model in response.models)

    async def model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """Raises: ModelNotFound."""
        response = await self._connection.unary("GetModel", requests.get_model_request(name), timeout_s)
        return responses.model_from(response.model)

    async def _events(
        self, method: str, request: baton_pb2.GenerateRequest | baton_pb2.ChatRequest, options: GenerateOptions
    ) -> AsyncGenerator[Event, None]:
        timeout_s = self._connection.timeout_s(options.get("timeout_s"))
        recovery = Recovery(method, request, self._connection.retry, timeout_s, time.monotonic())
        async with aclosing(self._connection.stream(recovery, self._connection.security.metadata(options))) as events:
            async for event in events:
                yield event


class AsyncAdminClient(_AsyncClient):
    """Talks to the admin port of one router."""

    def __init__(
        self, target: str = DEFAULT_ADMIN_TARGET, *, timeout_s: float | None = 5.0, retry: RetryPolicy | None = None
    ) -> None:
        super().__init__(AsyncConnection(target, admin_pb2_grpc.AdminServiceStub, retry or RetryPolicy(), timeout_s))

    async def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Workers, pages and load as that router sees them."""
        response = await self._connection.unary("GetStatus", admin_pb2.GetStatusRequest(), timeout_s)
        return responses.cluster_status_from(response)

    async def explain(self, request_id: str, *, timeout_s: float | None = None) -> RequestExplanation:
        """Why a request that has ended went where it went. Raises: ModelNotFound where that router does not know it."""
        message = admin_pb2.ExplainRequest(request_id=request_id)
        return explanation_from(await self._connection.unary("Explain", message, timeout_s))

    async def change_role(self, worker_id: str, role: Role, *, timeout_s: float | None = None) -> None:
        """Has a worker drain and then serve in another role; `status` shows when it does."""
        message = admin_pb2.ChangeRoleRequest(worker_id=worker_id, role=role_number(role))
        await self._connection.unary("ChangeRole", message, timeout_s)
