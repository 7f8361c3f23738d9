"""Where the internal plane reaches a worker, whatever its role."""

from abc import ABC, abstractmethod

import grpc

from engine.prepare import PreparedModel
from protos import kv_transfer_pb2, session_pb2
from service.grpc_options import INTERNAL_SERVER_OPTIONS
from service.server import Listener
from service.worker_config import WorkerConfig

SERVICE_NAMES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
)


class ServedWorker(ABC):
    """Base of the workers that `service.worker_process` runs."""

    def __init__(self, config: WorkerConfig, prepared: PreparedModel) -> None:
        self._prepared = prepared
        self._address = config

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers of SERVICE_NAMES."""

    @property
    def listener(self) -> Listener:
        config = self._address
        options, tls = INTERNAL_SERVER_OPTIONS, config.internal_tls
        return Listener(config.host, config.port, self.register, SERVICE_NAMES, options=options, tls=tls)

    @property
    def fingerprint(self) -> bytes:
        return self._prepared.fingerprint
