from protos import report_pb2 as _report_pb2
from protos import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("ready", "detail", "registry_connected", "workers", "active_requests", "queued_requests")
    READY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    detail: str
    registry_connected: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    active_requests: int
    queued_requests: int
    def __init__(self, ready: bool = ..., detail: _Optional[str] = ..., registry_connected: bool = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., active_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "endpoint", "connected", "epoch", "report", "in_flight_requests")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker: _session_pb2.WorkerInfo
    endpoint: str
    connected: bool
    epoch: int
    report: _report_pb2.Report
    in_flight_requests: int
    def __init__(self, worker: _Optional[_Union[_session_pb2.WorkerInfo, _Mapping]] = ..., endpoint: _Optional[str] = ..., connected: bool = ..., epoch: _Optional[int] = ..., report: _Optional[_Union[_report_pb2.Report, _Mapping]] = ..., in_flight_requests: _Optional[int] = ...) -> None: ...
