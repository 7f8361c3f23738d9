"""Spans reach real OTLP receivers, over gRPC and HTTP, as OpenTelemetry's variables say."""

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.process.config import ConfigError, TelemetryConfig, read_config
from baton.process.telemetry.collector import Collector, Protocol, choose_collector
from baton.process.telemetry.export import open_telemetry
from baton.process.telemetry.spans import FinishedSpan, SpanKind
from baton.versions import RELEASE
from tests.fixtures.servers import threaded_server

RECEIVED_S = 20.0
PROTOCOLS: tuple[Protocol, ...] = ("grpc", "http/protobuf")


class Received:
    """What a receiver was sent: messages, and of each its path and headers."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.event = threading.Event()

    def take(self, request: Any, path: str, headers: Mapping[str, str]) -> None:
        self.requests.append(request)
        self.paths.append(path)
        self.headers.append(headers)
        self.event.set()

    @property
    def spans(self) -> dict[str, Any]:
        exported = [resource for request in self.requests for resource in request.resource_spans]
        return {span.name: span for each in exported for scope in each.scope_spans for span in scope.spans}

    @property
    def services(self) -> set[str]:
        return self.of_resources("service.name")

    def of_resources(self, key: str) -> set[str]:
        return {
            attribute.value.string_value
            for request in self.requests
            for each in request.resource_spans
            for attribute in each.resource.attributes
            if attribute.key == key
        }


class GrpcReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self._received.take(request, "Export", metadata)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def over_grpc() -> Iterator[tuple[Received, str]]:
    received = Received()
    add = partial(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, GrpcReceiver(received))
    with threaded_server(add) as port:
        yield received, f"http://127.0.0.1:{port}"


@pytest.fixture
def over_http() -> Iterator[tuple[Received, str]]:
    received = Received()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            received.take(request, self.path, {key.lower(): value for key, value in self.headers.items()})
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """The output of the tests is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield received, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(RECEIVED_S)


@pytest.fixture(params=PROTOCOLS)
def receiver(request: pytest.FixtureRequest) -> tuple[Received, str, Protocol]:
    protocol: Protocol = request.param
    received, endpoint = request.getfixturevalue("over_grpc" if protocol == "grpc" else "over_http")
    return received, endpoint, protocol


def send_one(collector: Collector | None, received: Received) -> None:
    telemetry = open_telemetry("router", collector, None)
    telemetry.span(FinishedSpan("root", 1, 2))
    telemetry.close()
    assert received.event.wait(RECEIVED_S)


def test_spans_go_to_the_collector_with_the_name_of_the_process(receiver: tuple[Received, str, Protocol]) -> None:
    received, endpoint, protocol = receiver
    telemetry = open_telemetry("router", choose_collector(endpoint, protocol), None)
    root = telemetry.span(FinishedSpan("chat tiny", 1_000, 9_000, kind=SpanKind.SERVER, attributes={"n": 1}))
    telemetry.span(FinishedSpan("prefill.chunk", 2_000, 3_000, parent=root))
    telemetry.close()

    assert received.event.wait(RECEIVED_S)
    spans = received.spans
    assert received.services == {"router"} and received.of_resources("service.version") == {RELEASE}
    assert set(spans) == {"chat tiny", "prefill.chunk"}
    assert spans["prefill.chunk"].parent_span_id == spans["chat tiny"].span_id
    assert spans["prefill.chunk"].trace_id == spans["chat tiny"].trace_id
    assert (spans["chat tiny"].start_time_unix_nano, spans["chat tiny"].end_time_unix_nano) == (1_000, 9_000)


def test_variables_of_opentelemetry_alone_are_enough(
    receiver: tuple[Received, str, Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    received, endpoint, protocol = receiver
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue%20sky")
    send_one(read_config(TelemetryConfig, ()).collector, received)
    assert received.headers[0]["x-tenant"] == "blue sky"
    assert received.paths == ["/v1/traces" if protocol == "http/protobuf" else "Export"]


def test_headers_of_traces_win(receiver: tuple[Received, str, Protocol], monkeypatch: pytest.MonkeyPatch) -> None:
    received, endpoint, protocol = receiver
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=all")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-tenant=traces")
    send_one(choose_collector(endpoint, protocol), received)
    assert received.headers[0]["x-tenant"] == "traces"


def test_traces_endpoint_wins_and_is_used_unchanged(
    over_http: tuple[Received, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received, endpoint = over_http
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{endpoint}/ingest/otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    send_one(read_config(TelemetryConfig, ()).collector, received)
    assert received.paths == ["/ingest/otlp"]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/", "https://c/otlp/v1/traces"),
    ],
)
def test_path_of_traces_is_appended_over_http_alone(endpoint: str, url: str) -> None:
    assert choose_collector(endpoint, "http/protobuf") == Collector(url, "http/protobuf")
    assert choose_collector(endpoint, "grpc") == Collector(endpoint, "grpc")
    assert choose_collector(None, "grpc", endpoint, "http/protobuf") == Collector(endpoint, "http/protobuf")


@pytest.mark.parametrize("endpoint", ["c:4318", "ftp://c", "http://"])
def test_endpoint_without_a_scheme_is_refused_over_http_at_the_start(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"a URL such as http://host:4318"):
        read_config(TelemetryConfig, ["--otlp-protocol", "http/protobuf", "--otlp-endpoint", endpoint])


def test_json_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL.*'grpc' or 'http/protobuf'"):
        read_config(TelemetryConfig, ["--otlp-protocol", "http/json"])


def test_password_in_the_endpoint_is_never_shown() -> None:
    collector = choose_collector("https://me:hunter2@c:4318/x?token=hunter2", "http/protobuf")
    assert collector is not None and "hunter2" in collector.endpoint
    assert str(collector) == "https://c:4318/x/v1/traces (OTLP, http/protobuf)"
    assert "hunter2" not in repr(collector)
    with pytest.raises(ValueError, match="not c:4318") as refused:
        choose_collector("me:hunter2@c:4318", "http/protobuf")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mute", [False, True], ids=["refusing", "mute"])
def test_absent_collector_costs_nothing_and_is_reported_once(
    protocol: Protocol, mute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if mute:
            listener.listen()  # connections succeed, and no answer comes
        endpoint = f"http://me:hunter2@127.0.0.1:{listener.getsockname()[1]}"
        telemetry = open_telemetry("router", choose_collector(endpoint, protocol), None)
        started_s = time.monotonic()
        for _ in range(100):
            telemetry.span(FinishedSpan("root", 1, 2))
        assert time.monotonic() - started_s < 1.0  # less than one export that is waited for
        telemetry.close()
        assert time.monotonic() - started_s < 20.0  # 4 s; exports that are repeated take a minute
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 1
    assert "hunter2" not in caplog.text
