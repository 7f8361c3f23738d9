"""gRPC interceptors that prove knowledge of the cluster secret, on both sides of calls between processes.

Links are one long call with messages of their own: `router/fleet/link.py` creates and checks their proofs.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from baton.process.errors import Unauthenticated
from baton.process.security.cluster_secret import PROOF_KEY, CallProof, ClusterSecret, Metadata

NOT_PROVEN = "the process there does not prove that it knows this cluster's secret (BATON_SECRET_FILE)"


@dataclass(slots=True)
class ProofCheck:
    """Server's check that a caller knows the cluster secret."""

    secret: ClusterSecret
    port: int = 0  # port of the server, set when it is bound

    def answer(self, method: str, metadata: Metadata) -> tuple[tuple[str, str], ...]:
        """Check the caller's proof; return the server's proof as initial metadata of the response. Raises:
        Unauthenticated.
        """
        proof = self.secret.answer(method, self.port, metadata)
        if proof is None:
            message = "only processes that know this cluster's secret may call (BATON_SECRET_FILE)"
            raise Unauthenticated(message, "NO_PROOF")
        return ((PROOF_KEY, proof),)


def prove_call(secret: ClusterSecret, method: str, endpoint: str) -> CallProof:
    """Create the proof of a call to `endpoint`, host:port."""
    port = endpoint.rpartition(":")[2]
    return secret.call_proof(method, int(port) if port.isascii() and port.isdigit() else 0)


Continue = Callable[[Any, Any], Any]
AsyncContinue = Callable[[Any, Any], Awaitable[Any]]


class _Proving:
    def __init__(self, secret: ClusterSecret, endpoint: str) -> None:
        self._secret = secret
        self._endpoint = endpoint

    def _proven(self, details: Any) -> tuple[CallProof, Any]:
        """Return the proof of a call, and the call's details with this proof in the metadata."""
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        proof = prove_call(self._secret, method, self._endpoint)
        return proof, details._replace(metadata=(*(details.metadata or ()), *proof.metadata))


class ProvingInterceptor(_Proving, grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Interceptor of a blocking channel: adds proofs to calls, and rejects successful responses without a proof."""

    def intercept_unary_unary(self, continuation: Continue, details: Any, request: Any) -> Any:
        proof, proven = self._proven(details)
        call = continuation(proven, request)
        if not proof.is_answered_by(call.initial_metadata()) and call.code() is grpc.StatusCode.OK:
            raise _not_proven()
        return call

    def intercept_unary_stream(self, continuation: Continue, details: Any, request: Any) -> Any:
        proof, proven = self._proven(details)
        call = continuation(proven, request)
        is_proven = proof.is_answered_by(call.initial_metadata())
        if not is_proven and (not call.done() or call.code() is grpc.StatusCode.OK):
            call.cancel()
            raise _not_proven()
        return call


class _AsyncUnary(_Proving, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: AsyncContinue, details: Any, request: Any) -> Any:
        proof, proven = self._proven(details)
        call = await continuation(proven, request)
        if not proof.is_answered_by(await call.initial_metadata()) and await call.code() is grpc.StatusCode.OK:
            raise _not_proven()
        return call


class _AsyncStream(_Proving, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: AsyncContinue, details: Any, request: Any) -> Any:
        proof, proven = self._proven(details)
        call = await continuation(proven, request)
        is_proven = proof.is_answered_by(await call.initial_metadata())
        if not is_proven and (not call.done() or await call.code() is grpc.StatusCode.OK):
            call.cancel()
            raise _not_proven()
        return call


def async_proving_interceptors(secret: ClusterSecret, endpoint: str) -> list[grpc.aio.ClientInterceptor]:
    """Return the interceptors of an asyncio channel: one per kind of call, as grpc.aio requires."""
    return [_AsyncUnary(secret, endpoint), _AsyncStream(secret, endpoint)]


def _not_proven() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, nothing, nothing, NOT_PROVEN)
