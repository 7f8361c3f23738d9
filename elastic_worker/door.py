"""The gRPC services of one port, behind which the servicers may change while the server runs."""

from collections.abc import Sequence
from typing import Any

import grpc


class Door(grpc.GenericRpcHandler):
    """Stands in a server as a handler, and for each role as the server that its servicers are added to.

    Calls that are under way stay with the servicer that they reached.
    """

    def __init__(self) -> None:
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def clear(self) -> None:
        """New calls are refused as unknown, which a router takes for a worker that is not there yet."""
        self._handlers = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += tuple(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """The generated code offers these as well; a server of grpc.aio does without them, and so does this one."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return None
