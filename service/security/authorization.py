"""Asks, before a gRPC call is answered or even read, whether it may be made. Others decide which calls are allowed."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc

from baton.service.errors import BatonError

Authorise = Callable[[str, Iterable[tuple[str, str | bytes]]], object]
"""With a method (`/package.Service/Method`) and its metadata; raises a BatonError where the call may not be made."""


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
    """Of the one kind that waits for nothing of the client's, whatever kind the method is."""

    async def refuse(requests: object, context: object) -> NoReturn:
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
