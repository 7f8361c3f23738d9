"""Interceptors of every call: trace context and request id for logs, errors as statuses, authorization.

They replace OpenTelemetry's gRPC instrumentation, which records cancelled streams as OK and drops contexts.
"""

import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from baton.process.errors import BatonError, Internal, InvalidArgument, abort_with, release_frames
from baton.process.foreign_text import identifier_fault
from baton.process.security.proofs import ProofCheck
from baton.process.serving.health import SERVICE_NAME as HEALTH
from baton.process.telemetry.trace_context import current_request_id, current_trace, parse_traceparent

REQUEST_ID_KEY = "x-request-id"

logger = logging.getLogger(__name__)

Behaviour = Callable[[Any, Any], Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that converts a BatonError into its status with details. It converts any other exception into
    INTERNAL, and logs the traceback.

    Cancellations by the client, a deadline or a stopping server are not converted. With `proofs`, caller and server
    prove to each other that they know the cluster secret, before the call is handled.
    """

    def __init__(self, proofs: ProofCheck | None = None) -> None:
        self._proofs = proofs

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC responds UNIMPLEMENTED
            return handler
        method = handler_call_details.method.lstrip("/")
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
                return make_handler(  # type: ignore[no-any-return]
                    _guarded(behaviour, method, self._proofs), handler.request_deserializer, handler.response_serializer
                )
        raise TypeError(f"{method} has no behaviour")


def _guarded(behaviour: Behaviour, method: str, proofs: ProofCheck | None) -> Behaviour:
    """Wrap a handler so that it runs in `_call_scope`. The handler is an async generator or a coroutine function."""
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            # `aclosing` closes the generator with the call, so that an abandoned stream is cleaned up immediately
            async with _call_scope(context, method, proofs), aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return generate

    async def respond(request: Any, context: Any) -> Any:
        async with _call_scope(context, method, proofs):
            return await behaviour(request, context)

    return respond


@asynccontextmanager
async def _call_scope(context: Any, method: str, proofs: ProofCheck | None) -> AsyncIterator[None]:
    # Context values set here need no reset, since they end with the call's task. A reset would fail if the generator is
    # closed in another context.
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    current_trace.set(parse_traceparent(metadata.get("traceparent"), metadata.get("tracestate", "")))
    given = metadata.get(REQUEST_ID_KEY, "")
    current_request_id.set(given if given and identifier_fault(given) is None else None)
    try:
        if proofs is not None and not method.startswith(f"{HEALTH}/"):
            await context.send_initial_metadata(proofs.answer(f"/{method}", metadata.items()))
        yield
    except grpc.aio.AbortError:
        raise
    except BatonError as error:
        _identify_request()
        logger.info("%s: %s %s", method, error.code.name, error.log_text)
        release_frames(error)
        await abort_with(context, error)
    except DecodeError as error:  # only for request streams; gRPC handles it for other calls
        logger.info("%s: a message cannot be read: %s", method, error)
        await abort_with(context, InvalidArgument("message", "is not one of this method's"))
    except Exception:  # any other exception becomes INTERNAL
        request_id = _identify_request()
        logger.exception("%s failed", method)
        await abort_with(context, Internal("UNEXPECTED", request_id))


def _identify_request() -> str:
    """Return the request id of a failed call; create an id if the call has none.

    A call that succeeds needs no id here: most calls are links of workers, and a request gets its id later.
    """
    request_id = current_request_id.get() or f"req-{secrets.token_hex(8)}"
    current_request_id.set(request_id)
    return request_id


Authorise = Callable[[str, Iterable[tuple[str, str | bytes]]], object]
"""Function of a method (`/package.Service/Method`) and its metadata; raises a BatonError for a forbidden call."""


class AuthorizationInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that refuses forbidden calls, also to unknown methods. Must follow CallInterceptor, which sends the
    status.
    """

    def __init__(self, authorise: Authorise) -> None:
        self._authorise = authorise

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        try:
            self._authorise(handler_call_details.method, handler_call_details.invocation_metadata or ())
        except BatonError as error:
            return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: BatonError) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return a handler that refuses any kind of call without reading requests."""

    async def refuse(requests: object, context: object) -> NoReturn:
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
