"""Spans reach a real OTLP receiver over gRPC, when one is configured."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.service.telemetry.spans import FinishedSpan, SpanKind, open_telemetry

RECEIVED_S = 5.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.received = threading.Event()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        self.received.set()
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def test_spans_go_to_the_collector_with_the_name_of_the_process(collector: tuple[Collector, str]) -> None:
    receiver, endpoint = collector
    telemetry = open_telemetry("router", endpoint, None)
    root = telemetry.span(FinishedSpan("chat tiny", 1_000, 9_000, kind=SpanKind.SERVER, attributes={"n": 1}))
    telemetry.span(FinishedSpan("prefill.chunk", 2_000, 3_000, parent=root))
    telemetry.close()

    assert receiver.received.wait(RECEIVED_S)
    exported = [resource for request in receiver.requests for resource in request.resource_spans]
    names = {
        attribute.value.string_value
        for each in exported
        for attribute in each.resource.attributes
        if attribute.key == "service.name"
    }
    spans = {span.name: span for each in exported for scope in each.scope_spans for span in scope.spans}
    assert names == {"router"}
    assert set(spans) == {"chat tiny", "prefill.chunk"}
    assert spans["prefill.chunk"].parent_span_id == spans["chat tiny"].span_id
    assert spans["prefill.chunk"].trace_id == spans["chat tiny"].trace_id
    assert (spans["chat tiny"].start_time_unix_nano, spans["chat tiny"].end_time_unix_nano) == (1_000, 9_000)
