"""Interceptors for every call: its trace context and request id for the logs, its errors as statuses, and whether it
may be made.

OpenTelemetry's own gRPC instrumentation records cancelled streams as OK and drops contexts; this replaces it.
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
    """BatonError becomes its status with details; anything unknown INTERNAL, its traceback only in our log.

    Cancellation (by the client, a deadline or a stopping server) passes untouched. With `proofs`, callers and this
    server prove to each other that they know the cluster's secret, before anything of the call is handled.
    """

    def __init__(self, proofs: ProofCheck | None = None) -> None:
        self._proofs = proofs

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
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
    """The same behaviour, of the same kind (asynchronous generator or coroutine), inside a call scope."""
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            # closed with the call: a stream that ends while it is being written is cleaned up at once
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
    # Each call runs in a task of its own: values set here end with it and are never reset, which fails where a
    # generator is closed from another context.
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
    except DecodeError as error:  # of a stream; of other calls gRPC itself answers
        logger.info("%s: a message cannot be read: %s", method, error)
        await abort_with(context, InvalidArgument("message", "is not one of this method's"))
    except Exception:  # the edge of every call: a fault of any kind becomes INTERNAL and a traceback in the log
        request_id = _identify_request()
        logger.exception("%s failed", method)
        await abort_with(context, Internal("UNEXPECTED", request_id))


def _identify_request() -> str:
    """The id of the call that failed: its own, or a new one where it was refused before it got any.

    Not drawn for every call: most are no requests (a worker's sessions), and those that are get their id further in.
    """
    request_id = current_request_id.get() or f"req-{secrets.token_hex(8)}"
    current_request_id.set(request_id)
    return request_id


Authorise = Callable[[str, Iterable[tuple[str, str | bytes]]], object]
"""Function of a method (`/package.Service/Method`) and its metadata; raises a BatonError if the call is not allowed."""


class AuthorizationInterceptor(grpc.aio.ServerInterceptor):
    """Stands behind CallInterceptor, which makes a status of the refusal. Methods that do not exist are refused too."""

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
    """Return a handler that refuses without waiting for the client, whatever kind the method is."""

    async def refuse(requests: object, context: object) -> NoReturn:
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
