"""Worker behind its gRPC server: loads the model once and serves one role after another with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import grpc

from baton.kvtransfer.puller import PullThread
from baton.process.errors import Unavailable
from baton.process.registry.membership import Epoch
from baton.process.registry.worker_record import WorkerRole
from baton.process.security.proofs import ProofCheck
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.process.serving.server import Listener
from baton.worker.config import WorkerConfig
from baton.worker.host import EngineHost
from baton.worker.role import SERVICE_NAMES, RoleContext, ServingRole
from baton.worker.service import ChangeRole, FaultHandler

LOADING_RETRY_S = 0.5
MakeRole = Callable[[RoleContext], ServingRole]


async def _refuse(requests: Any, context: Any) -> NoReturn:
    raise Unavailable("the engine is still loading", "LOADING", LOADING_RETRY_S)


_LOADING: "grpc.RpcMethodHandler[Any, Any]" = grpc.stream_stream_rpc_method_handler(_refuse)


class ServicerSwitch(grpc.GenericRpcHandler):
    """Generic handler of a gRPC server whose servicers can be exchanged. Running calls stay with their servicer."""

    def __init__(self) -> None:
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def show(self, role: ServingRole) -> None:
        """Direct new calls to the servicers of `role`."""
        self._handlers = ()
        role.register(cast(grpc.aio.Server, self))

    def clear(self) -> None:
        """Refuse new calls with UNAVAILABLE and reason LOADING."""
        self._handlers = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += tuple(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Ignore these handlers, like grpc.aio's server: they also arrive by `add_generic_rpc_handlers`."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        service_name = handler_call_details.method.strip("/").partition("/")[0]
        return _LOADING if not self._handlers and service_name in SERVICE_NAMES else None


class ServedWorker:
    """A `worker.process.Worker` that owns the engine host and the role that serves at present."""

    def __init__(
        self,
        config: WorkerConfig,
        host: EngineHost,
        epoch: int,
        role: WorkerRole,
        roles: Mapping[WorkerRole, MakeRole],
        pulls: PullThread | None = None,
    ) -> None:
        """Create a worker that serves `role` of `roles` first. `pulls`: see `RoleContext`."""
        self._address = config
        self.host = host
        self.role = role
        self._epoch = epoch
        self._roles = roles
        self._pulls = pulls
        self._switch = ServicerSwitch()
        self._on_fault: FaultHandler = lambda fault: None
        self._on_role: Callable[[Epoch], None] = lambda epoch: None
        self.serving: ServingRole | None = None
        """Role that serves; None while an engine starts."""

    @property
    def listener(self) -> Listener:
        config = self._address
        options, tls = INTERNAL_SERVER_OPTIONS, config.internal_tls
        proofs = None if config.cluster_secret is None else ProofCheck(config.cluster_secret)
        return Listener(config.host, config.port, self.register, SERVICE_NAMES, options=options, tls=tls, proofs=proofs)

    @property
    def fingerprint(self) -> bytes:
        return self.host.prepared.fingerprint

    @property
    def busy(self) -> bool:
        return self.serving is not None and self.serving.busy

    @property
    def turns(self) -> int | None:
        return None if self.serving is None else self.serving.loop.turns

    def register(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self._switch,))

    async def start(self, on_fault: FaultHandler, on_role: Callable[[Epoch], None] = lambda epoch: None) -> None:
        self._on_fault, self._on_role = on_fault, on_role
        await self._serve(self.role, self._epoch)

    def report(self) -> None:
        if self.serving is not None:
            self.serving.report()

    def begin_drain(self) -> None:
        if self.serving is not None:
            self.serving.begin_drain()

    async def stop(self) -> None:
        await self._end_role()
        await self.host.close()

    def _lost(self, fault: BaseException) -> None:
        """Report a fault of the host, which ends every role."""
        if self.serving is not None:
            self.serving.service.broken = True
        self._on_fault(fault)

    async def _serve(self, role: WorkerRole, epoch: int, change_role: ChangeRole | None = None) -> None:
        """Start `role`; return when it serves. After a failure, nothing of the role stays open."""
        model = await self.host.load(self._lost)
        context = RoleContext(epoch, self.host, model, self._on_fault, change_role, self._pulls)
        serving = self._roles[role](context)
        try:
            await serving.start()
        except BaseException:
            await serving.stop()
            raise
        self._switch.show(serving)
        self.role, self.serving = role, serving

    async def _end_role(self) -> None:
        """Stop the role that serves; afterwards, calls to the servicers are refused."""
        serving, self.serving = self.serving, None
        if serving is not None:
            await serving.stop()
            self._switch.clear()
