"""Asks an HTTP port of Baton for the gRPC port of the same server."""

import http.client
import json
import ssl

from cli.connection import Credentials

_TIMEOUT_S = 2.0


def grpc_port_of(target: str, credentials: Credentials) -> int | None:
    """`target`: host:port. None where no Baton answers there, or not to this caller."""
    headers = {"authorization": f"Bearer {credentials['api_key']}"} if credentials["api_key"] else {}
    try:
        connection = _connection(target, credentials)
        try:
            connection.request("GET", "/version", headers=headers)
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    port = answer.get("grpc_port") if isinstance(answer, dict) else None
    return port if isinstance(port, int) else None


def _connection(target: str, credentials: Credentials) -> http.client.HTTPConnection:
    """Raises: OSError where the certificates cannot be read."""
    authority = credentials["tls"]
    if authority is False:
        return http.client.HTTPConnection(target, timeout=_TIMEOUT_S)
    context = ssl.create_default_context(cafile=None if authority is True else authority)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: the certificate itself may be the one trusted
    return http.client.HTTPSConnection(target, timeout=_TIMEOUT_S, context=context)
