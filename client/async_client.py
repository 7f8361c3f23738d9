"""The asyncio client: calls with deadlines, retries and typed errors. generate.py writes sync_client.py from it."""

import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from baton.client import requests, responses
from baton.client.answer import completion_from
from baton.client.async_transport import FAILURES, AsyncChannels, MakeStub, error_from, sleep
from baton.client.channel import (
    DEFAULT_ADMIN_TARGET,
    DEFAULT_TARGET,
    OPEN,
    AdminSecurity,
    Metadata,
    RouterChoice,
    Security,
)
from baton.client.cluster import AdapterStatus, ClusterStatus, RecentRequest, RequestExplanation, Role
from baton.client.convert import value_from
from baton.client.requests import ChatOptions, GenerateOptions, VectorOptions
from baton.client.retry import Attempts, Recovery, RetryPolicy
from baton.client.timelines import ProcessTimeline
from baton.client.types import Completion, Embeddings, Event, Message, Model, Scores
from baton.client.why import RequestWhy
from baton.protos import admin_pb2, admin_pb2_grpc, baton_pb2, baton_pb2_grpc


class AsyncConnection(RouterChoice):
    """Calls of one service; a call that fails is repeated at the next target."""

    def __init__(
        self,
        make_stub: MakeStub,
        target: str | Sequence[str],
        retry: RetryPolicy,
        timeout_s: float | None,
        security: Security = OPEN,
    ) -> None:
        """Prepare channels without connecting. Raises: ValueError without a target, OSError for an unreadable
        certificate file.
        """
        super().__init__(target, retry, timeout_s, security)
        self._channels = AsyncChannels(self, make_stub)

    async def close(self) -> None:
        """Cancel all calls; their readers get Cancelled."""
        self.closed = True
        await self._channels.close()

    async def unary(self, method: str, request: object, timeout_s: float | None) -> Any:
        """Return the response of a call. Raises: BatonClientError."""
        attempts = Attempts(self.retry, self.timeout_s(timeout_s), time.monotonic())
        metadata = self.security.metadata()
        while True:
            current = self.current
            call = getattr(self._channels.stub(current), method)
            try:
                return await call(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            except FAILURES as failure:
                error = error_from(failure)
                wait_s = attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self.closed:
                    raise error from failure
            self.leave(current, error)
            await sleep(wait_s)

    async def messages(self, method: str, request: object, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """Yield the messages of a streamed call, which is not repeated. Raises: BatonClientError."""
        call = getattr(self._channels.stub(self.current), method)
        try:
            async for message in call(request, timeout=self.timeout_s(timeout_s), metadata=self.security.metadata()):
                yield message
        except FAILURES as failure:
            raise error_from(failure) from failure

    async def stream(self, recovery: Recovery, metadata: Metadata) -> AsyncGenerator[Event, None]:
        """Yield the events of one answer. Failed calls are repeated. Closing the generator cancels the call."""
        while True:
            current = self.current
            method = getattr(self._channels.stub(current), recovery.method)
            call = method(recovery.message, timeout=recovery.remaining_s(time.monotonic()), metadata=metadata)
            try:
                async for response in call:
                    event = recovery.take(response)
                    if event is not None:
                        yield event
                recovery.end()
                return
            except FAILURES as failure:
                error = error_from(failure)
                if recovery.is_whole:
                    return
                wait_s = recovery.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self.closed:
                    raise error from failure
            finally:
                call.cancel()
            self.leave(current, error)
            await sleep(wait_s)


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
    """Client of the routers of a cluster. Belongs to the event loop of its first call. Raises: BatonClientError.

    `target`: host:port, or several of one cluster as a sequence or separated by commas. All calls go to one router
    until that fails. An interrupted stream is resumed at the same or another router.
    `timeout_s`: limit of each call, retries included; None leaves it to the server.
    `tls`: True, or a PEM file with the certificate authorities to trust.
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
            AsyncConnection(baton_pb2_grpc.BatonServiceStub, target, retry or RetryPolicy(), timeout_s, security)
        )

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """Continue a text or a sequence of token ids.

        The call starts when the first event is read, and `aclose()` cancels it: a caller that may leave the loop early
        reads under `contextlib.aclosing`.
        """
        return self._events("Generate", requests.generate_request(prompt, options), options)

    def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Event, None]:
        """Continue a conversation, oldest message first. Calls start and end like those of `generate`."""
        return self._events("Chat", requests.chat_request(messages, options), options)

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        """Return the complete answer of `generate`."""
        async with aclosing(self.generate(prompt, **options)) as events:
            return completion_from([event async for event in events])

    async def complete_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Completion:
        """Return the complete answer of `chat`."""
        async with aclosing(self.chat(messages, **options)) as events:
            return completion_from([event async for event in events])

    async def embed(
        self,
        inputs: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[VectorOptions],
    ) -> Embeddings:
        """Return one vector for each text or sequence of token ids, cut to its first `dimensions` numbers.

        `prompt_name`: name of the checkpoint's prompt to put before each text; None: its default.
        """
        request = requests.embed_request(inputs, dimensions, prompt_name, options)
        return responses.embeddings_from(await self._connection.unary("Embed", request, timeout_s))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[VectorOptions],
    ) -> Scores:
        """Return how well each document matches its query; a single query is compared with all documents."""
        request = requests.score_request(queries, documents, options)
        return value_from(Scores, await self._connection.unary("Score", request, timeout_s))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str = "", timeout_s: float | None = None
    ) -> tuple[int, ...]:
        fields = {"text": text, "add_special_tokens": add_special_tokens, "model": model}
        request = requests.with_fields(baton_pb2.TokenizeRequest(), fields)
        return tuple((await self._connection.unary("Tokenize", request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        fields = {"token_ids": token_ids, "skip_special_tokens": skip_special_tokens, "model": model}
        request = requests.with_fields(baton_pb2.DetokenizeRequest(), fields)
        text: str = (await self._connection.unary("Detokenize", request, timeout_s)).text
        return text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        response = await self._connection.unary("ListModels", baton_pb2.ListModelsRequest(), timeout_s)
        return tuple(value_from(Model, model) for model in response.models)

    async def model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """Return a model by name. Raises: ModelNotFound."""
        request = requests.with_fields(baton_pb2.GetModelRequest(), {"model": name})
        response = await self._connection.unary("GetModel", request, timeout_s)
        return value_from(Model, response.model)

    async def _events(
        self, method: str, request: baton_pb2.GenerateRequest | baton_pb2.ChatRequest, options: GenerateOptions
    ) -> AsyncGenerator[Event, None]:
        timeout_s = self._connection.timeout_s(options.get("timeout_s"))
        recovery = Recovery(method, request, self._connection.retry, timeout_s, time.monotonic())
        async with aclosing(self._connection.stream(recovery, self._connection.security.metadata(options))) as events:
            async for event in events:
                yield event


class AsyncAdminClient(_AsyncClient):
    """Client of the admin port of one router."""

    def __init__(
        self,
        target: str = DEFAULT_ADMIN_TARGET,
        *,
        timeout_s: float | None = 5.0,
        retry: RetryPolicy | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect with an admin key, or without one to a service that the same user started on the same machine."""
        security = AdminSecurity(api_key, target=target)
        stub, tries = admin_pb2_grpc.AdminServiceStub, retry or RetryPolicy()
        super().__init__(AsyncConnection(stub, target, tries, timeout_s, security))

    async def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return workers, KV blocks and load as that router sees them."""
        response = await self._connection.unary("GetStatus", admin_pb2.GetStatusRequest(), timeout_s)
        return value_from(ClusterStatus, response)

    async def explain(self, request_id: str, *, timeout_s: float | None = None) -> RequestExplanation:
        """Explain the placement of a finished request. Raises: ModelNotFound if that router does not know it."""
        message = admin_pb2.ExplainRequest(request_id=request_id)
        return value_from(RequestExplanation, await self._connection.unary("Explain", message, timeout_s))

    async def recent_requests(
        self, *, limit: int = 64, request_id: str = "", timeout_s: float | None = None
    ) -> tuple[RecentRequest, ...]:
        """Return the newest requests, at most `limit`: running ones, then finished ones, newest first.

        `request_id`: return this request only, by its own id or its trace's; nothing if that router does not know it.
        """
        message = admin_pb2.RecentRequestsRequest(limit=limit, request_id=request_id)
        response = await self._connection.unary("RecentRequests", message, timeout_s)
        return tuple(value_from(RecentRequest, request) for request in response.requests)

    async def why(self, request_id: str, *, timeout_s: float | None = None) -> RequestWhy:
        """Explain the latency and the cache misses of a finished request. Raises: ModelNotFound."""
        message = admin_pb2.WhyRequest(request_id=request_id)
        return value_from(RequestWhy, await self._connection.unary("Why", message, timeout_s))

    async def timelines(
        self,
        request_id: str = "",
        *,
        last_ms: int = 0,
        with_inputs: bool = False,
        with_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> list[ProcessTimeline]:
        """Return the timelines of that router and its workers around a request, or of the last `last_ms`.

        `with_inputs`: also return what decided about the requests, for `baton replay`. `with_tokens`: these inputs
        include the token ids that a router with --record-tokens-mib keeps.

        Raises: ModelNotFound if that router does not know the request.
        """
        message = admin_pb2.GetTimelinesRequest(
            request_id=request_id, last_ms=last_ms, with_inputs=with_inputs, with_tokens=with_tokens
        )
        answers = self._connection.messages("GetTimelines", message, timeout_s)
        return [responses.timeline_from(answer.process) async for answer in answers]

    async def change_role(self, worker_id: str, role: Role, *, timeout_s: float | None = None) -> None:
        """Make a worker drain and then serve in another role; `status` shows when it does."""
        message = admin_pb2.ChangeRoleRequest(worker_id=worker_id, role=responses.role_number(role))
        await self._connection.unary("ChangeRole", message, timeout_s)

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, timeout_s: float | None = None
    ) -> Sequence[str]:
        """Load a LoRA adapter on all workers and return their ids. `path`: folder of the adapter, as workers see it."""
        message = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        return tuple((await self._connection.unary("LoadAdapter", message, timeout_s)).worker_ids)

    async def reload(self, path: str, *, grace_s: float, timeout_s: float | None = None) -> tuple[str, Sequence[str]]:
        """Load other weights of the model on all workers; return their version and the workers' ids.

        `path`: folder of the checkpoint, as workers see it. Requests with the old weights fail after `grace_s`.
        """
        message = admin_pb2.ReloadRequest(path=path, grace_s=grace_s)
        response = await self._connection.unary("Reload", message, timeout_s)
        return response.version, tuple(response.worker_ids)

    async def unload_adapter(self, name: str, *, wait_s: float = 0.0, timeout_s: float | None = None) -> Sequence[str]:
        """Withdraw an adapter from new requests; return the workers that keep it for running requests."""
        message = admin_pb2.UnloadAdapterRequest(name=name, wait_s=wait_s)
        return tuple((await self._connection.unary("UnloadAdapter", message, timeout_s)).worker_ids)

    async def adapters(self, *, timeout_s: float | None = None) -> Sequence[AdapterStatus]:
        """Return the LoRA adapters and the workers that have them."""
        message = admin_pb2.ListAdaptersRequest()
        response = await self._connection.unary("ListAdapters", message, timeout_s)
        return tuple(value_from(AdapterStatus, adapter) for adapter in response.adapters)
