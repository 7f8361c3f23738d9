"""The blocking client, its calls with deadline, retries and typed errors. Its twin, line by line: async_client.py."""

import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import grpc
import grpc.experimental

from baton.client import requests, responses
from baton.client.answer import completion_from
from baton.client.channel import (
    DEFAULT_ADMIN_TARGET,
    DEFAULT_TARGET,
    OPEN,
    AdminSecurity,
    Connection,
    Metadata,
    Security,
    options_of,
)
from baton.client.cluster import AdapterStatus, ClusterStatus, RecentRequest, RequestExplanation, Role
from baton.client.errors import BatonClientError, Unavailable, error_from_status
from baton.client.requests import ChatOptions, GenerateOptions, VectorOptions
from baton.client.retry import Attempts, Recovery, RetryPolicy
from baton.client.timelines import ProcessTimeline
from baton.client.types import Completion, Embeddings, Event, Message, Model, Scores
from baton.client.why import RequestWhy
from baton.protos import admin_pb2, admin_pb2_grpc, baton_pb2, baton_pb2_grpc

# The thread that reads an answer handles its events itself. By default another thread handles them under a lock that
# Ctrl-C can leave taken: an interrupt within Condition.__enter__ (https://bugs.python.org/issue29988) then hangs every
# later call of the channel.
_SINGLE_THREADED = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


class _Way(NamedTuple):
    channel: grpc.Channel
    stub: Any


class SyncConnection(Connection):
    """Safe to share between threads."""

    def __init__(
        self,
        make_stub: Callable[[grpc.Channel], Any],
        target: str | Sequence[str],
        retry: RetryPolicy,
        timeout_s: float | None,
        security: Security = OPEN,
    ) -> None:
        """`make_stub`: of the one service that this connection is for. Raises: as Connection."""
        super().__init__(target, retry, timeout_s, security)
        channels = [
            grpc.insecure_channel(each, (*options_of(each), _SINGLE_THREADED))
            if self.credentials is None
            else grpc.secure_channel(each, self.credentials, (*options_of(each), _SINGLE_THREADED))
            for each in self.targets
        ]
        self._ways = [_Way(channel, make_stub(channel)) for channel in channels]

    def close(self) -> None:
        """Ends the calls that are under way; their readers get Cancelled."""
        self.closed = True
        for way in self._ways:
            way.channel.close()

    def unary(self, method: str, request: object, timeout_s: float | None) -> Any:
        attempts = Attempts(self.retry, self.timeout_s(timeout_s), time.monotonic())
        metadata = self.security.metadata()
        while True:
            current = self.current
            call = getattr(self._ways[current].stub, method)
            try:
                return call(request, timeout=attempts.remaining_s(time.monotonic()), metadata=metadata)
            except grpc.RpcError as failure:
                error = _error_from(failure)
                wait_s = attempts.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self.closed:
                    raise error from failure
            self.leave(current, error)
            time.sleep(wait_s)

    def messages(self, method: str, request: object, timeout_s: float | None) -> Iterator[Any]:
        """Those of one call, which is not tried again. Raises: BatonClientError."""
        call = getattr(self._ways[self.current].stub, method)
        try:
            yield from call(request, timeout=self.timeout_s(timeout_s), metadata=self.security.metadata())
        except grpc.RpcError as failure:
            raise _error_from(failure) from failure

    def stream(self, recovery: Recovery, metadata: Metadata) -> Generator[Event, None, None]:
        """The events of one answer, over as many streams as it takes. Closing the generator cancels the call."""
        while True:
            current = self.current
            method = getattr(self._ways[current].stub, recovery.method)
            call = method(recovery.message, timeout=recovery.remaining_s(time.monotonic()), metadata=metadata)
            try:
                for response in call:
                    event = recovery.take(response)
                    if event is not None:
                        yield event
                recovery.end()
                return
            except grpc.RpcError as failure:
                error = _error_from(failure)
                if recovery.is_whole:
                    return
                wait_s = recovery.wait_s(error, time.monotonic(), random.random())
                if wait_s is None or self.closed:
                    raise error from failure
            finally:
                call.cancel()
            self.leave(current, error)
            time.sleep(wait_s)


def _error_from(failure: grpc.RpcError) -> BatonClientError:
    if isinstance(failure, grpc.Call):
        return error_from_status(failure.code(), failure.details(), failure.trailing_metadata() or ())
    return Unavailable(str(failure))


class _Client:
    def __init__(self, connection: SyncConnection) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BatonClient(_Client):
    """Talks to a router. Connects on the first call; may be shared between threads.

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
            SyncConnection(baton_pb2_grpc.BatonServiceStub, target, retry or RetryPolicy(), timeout_s, security)
        )

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generator[Event, None, None]:
        """Continues a text, or token ids. The call begins with the first `next` and is cancelled by `close()`."""
        return self._events("Generate", requests.generate_request(prompt, options), options)

    def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Generator[Event, None, None]:
        """As `generate`, for a conversation, oldest message first."""
        return self._events("Chat", requests.chat_request(messages, options), options)

    def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, collected."""
        return completion_from(list(self.generate(prompt, **options)))

    def complete_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Completion:
        """`chat`, collected."""
        return completion_from(list(self.chat(messages, **options)))

    def embed(
        self,
        inputs: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[VectorOptions],
    ) -> Embeddings:
        """One vector for each text, or sequence of token ids; `dimensions`: so many numbers of each, the first ones.

        `prompt_name`: of the checkpoint's prompts, the one that stands before each text; None: its default.
        """
        request = requests.embed_request(inputs, dimensions, prompt_name, options)
        return responses.embeddings_from(self._connection.unary("Embed", request, timeout_s))

    def score(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[VectorOptions],
    ) -> Scores:
        """How well each document suits its query, or the only one."""
        request = requests.score_request(queries, documents, options)
        return responses.scores_from(self._connection.unary("Score", request, timeout_s))

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str = "", timeout_s: float | None = None
    ) -> tuple[int, ...]:
        request = requests.tokenize_request(text, add_special_tokens, model)
        return tuple(self._connection.unary("Tokenize", request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        request = requests.detokenize_request(token_ids, skip_special_tokens, model)
        text: str = self._connection.unary("Detokenize", request, timeout_s).text
        return text

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        response = self._connection.unary("ListModels", baton_pb2.ListModelsRequest(), timeout_s)
        return tuple(responses.model_from(model) for model in response.models)

    def model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """Raises: ModelNotFound."""
        response = self._connection.unary("GetModel", requests.get_model_request(name), timeout_s)
        return responses.model_from(response.model)

    def _events(
        self, method: str, request: baton_pb2.GenerateRequest | baton_pb2.ChatRequest, options: GenerateOptions
    ) -> Generator[Event, None, None]:
        timeout_s = self._connection.timeout_s(options.get("timeout_s"))
        recovery = Recovery(method, request, self._connection.retry, timeout_s, time.monotonic())
        with closing(self._connection.stream(recovery, self._connection.security.metadata(options))) as events:
            yield from events


class AdminClient(_Client):
    """Talks to the admin port of one router."""

    def __init__(
        self,
        target: str = DEFAULT_ADMIN_TARGET,
        *,
        timeout_s: float | None = 5.0,
        retry: RetryPolicy | None = None,
        api_key: str | None = None,
    ) -> None:
        """`api_key`: an admin key; not needed for a service that this user has started on this machine."""
        security = AdminSecurity(api_key, target=target)
        stub, tries = admin_pb2_grpc.AdminServiceStub, retry or RetryPolicy()
        super().__init__(SyncConnection(stub, target, tries, timeout_s, security))

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Workers, pages and load as that router sees them."""
        response = self._connection.unary("GetStatus", admin_pb2.GetStatusRequest(), timeout_s)
        return responses.cluster_status_from(response)

    def explain(self, request_id: str, *, timeout_s: float | None = None) -> RequestExplanation:
        """Why a request that has ended went where it went. Raises: ModelNotFound where that router does not know it."""
        message = admin_pb2.ExplainRequest(request_id=request_id)
        return responses.explanation_from(self._connection.unary("Explain", message, timeout_s))

    def why(self, request_id: str, *, timeout_s: float | None = None) -> RequestWhy:
        """Where the time of a request that has ended went, and why its prompt was not cached. Raises as `explain`."""
        message = admin_pb2.WhyRequest(request_id=request_id)
        return responses.why_from(self._connection.unary("Why", message, timeout_s))

    def timelines(
        self, request_id: str = "", *, last_ms: int = 0, timeout_s: float | None = None
    ) -> list[ProcessTimeline]:
        """What that router and its workers did around a request, or lately. Raises: ModelNotFound where that router
        does not know the request any more.
        """
        message = admin_pb2.GetTimelinesRequest(request_id=request_id, last_ms=last_ms)
        answers = self._connection.messages("GetTimelines", message, timeout_s)
        return [responses.timeline_from(answer.process) for answer in answers]

    def recent_requests(
        self, *, limit: int = 64, request_id: str = "", timeout_s: float | None = None
    ) -> tuple[RecentRequest, ...]:
        """The newest requests, at most `limit`: running ones, then those that have ended, the newest first of each.

        `request_id`: only this one, by its id or that of its trace; none where that router does not know it.
        """
        message = admin_pb2.RecentRequestsRequest(limit=limit, request_id=request_id)
        return responses.recent_requests_from(self._connection.unary("RecentRequests", message, timeout_s))

    def change_role(self, worker_id: str, role: Role, *, timeout_s: float | None = None) -> None:
        """Has a worker drain and then serve in another role; `status` shows when it does."""
        message = admin_pb2.ChangeRoleRequest(worker_id=worker_id, role=responses.role_number(role))
        self._connection.unary("ChangeRole", message, timeout_s)

    def load_adapter(
        self, name: str, path: str, *, replace: bool = False, timeout_s: float | None = None
    ) -> Sequence[str]:
        """Loads a LoRA adapter on all workers; returns them. `path`: of its folder, as workers see it."""
        message = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        return tuple((self._connection.unary("LoadAdapter", message, timeout_s)).worker_ids)

    def reload(self, path: str, *, grace_s: float, timeout_s: float | None = None) -> tuple[str, Sequence[str]]:
        """Loads other weights of the model on all workers; returns their version, and the workers.

        `path`: of a checkpoint's folder, as workers see it. Requests of the old weights fail after `grace_s`.
        """
        message = admin_pb2.ReloadRequest(path=path, grace_s=grace_s)
        response = self._connection.unary("Reload", message, timeout_s)
        return response.version, tuple(response.worker_ids)

    def unload_adapter(self, name: str, *, wait_s: float = 0.0, timeout_s: float | None = None) -> Sequence[str]:
        """Requests cannot choose it any more; returns the workers that still keep it for requests that run."""
        message = admin_pb2.UnloadAdapterRequest(name=name, wait_s=wait_s)
        return tuple((self._connection.unary("UnloadAdapter", message, timeout_s)).worker_ids)

    def adapters(self, *, timeout_s: float | None = None) -> Sequence[AdapterStatus]:
        """LoRA adapters, and which workers have them."""
        message = admin_pb2.ListAdaptersRequest()
        return responses.adapters_from(self._connection.unary("ListAdapters", message, timeout_s))
