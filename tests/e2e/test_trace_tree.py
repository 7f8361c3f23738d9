"""Spans of all processes reach an OpenTelemetry collector as one connected tree, also after a failover."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.client import AsyncBatonClient, Delta
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.servers import threaded_server

ARRIVE_S = 20.0
TOKENS, KILLED_AFTER = 800, 40
HELD_TOKENS = 700  # after which an answer pauses until its worker is killed


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP collector that keeps the spans of each trace."""

    def __init__(self) -> None:
        self.spans: dict[bytes, list[Any]] = defaultdict(list)

    def Export(self, request: Any, context: Any) -> Any:
        for of_process in request.resource_spans:
            for scope in of_process.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id].append(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def tree_of(self, request_id: str) -> list[Any]:
        """Return the spans of a trace; empty until its root has arrived."""

        def is_root(span: Any) -> bool:
            return any(
                each.key == "gen_ai.response.id" and each.value.string_value == request_id for each in span.attributes
            )

        return list(next((spans for spans in list(self.spans.values()) if any(map(is_root, spans))), []))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collecting = Collector()
    add = partial(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, collecting)
    with threaded_server(add) as port, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield collecting


@pytest.fixture(scope="module")
def traced(collector: Collector, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = make_stack(tmp_path_factory.mktemp("traced"), tiny_llama, decode=2)
    make_answers_holdable(stack)
    yield from run(stack)


async def answer(stack: Stack, kill: bool) -> str:
    """Send a request and return its id. `kill`: kill its decode worker in the middle."""
    name = f"tree-{uuid.uuid4().hex}"
    tokens = 0
    async with AsyncBatonClient(stack.target, timeout_s=60) as client:
        events = client.generate([9] * 60, max_tokens=TOKENS, ignore_eos=True, cache_salt=name, request_id=name)
        with answers_held(stack, HELD_TOKENS if kill else TOKENS) as held:
            async for event in events:
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if kill and tokens >= KILLED_AFTER:
                    kill = False
                    await asyncio.to_thread(stack.kill_the_answering)
                    held.let_go()
    assert tokens == TOKENS
    return name


def roots(spans: list[Any]) -> list[Any]:
    """Return the spans without a known parent."""
    ids = {span.span_id for span in spans}
    return [span for span in spans if span.parent_span_id not in ids]


def names(spans: list[Any]) -> set[str]:
    return {span.name for span in spans}


@pytest.mark.parametrize("kill", [False, True])
async def test_one_connected_tree(traced: Stack, collector: Collector, kill: bool) -> None:
    name = await answer(traced, kill)
    wanted = {"worker.prefill", "worker.decode", "worker.kv.pull", "worker.decode.steps", "decode"}
    wanted |= {"attempt"} if kill else set()

    def whole() -> bool:
        """Return whether all spans have arrived: each process exports in batches, so a child may precede its parent."""
        spans = collector.tree_of(name)
        return names(spans) >= wanted and len(roots(spans)) == 1

    await asyncio.to_thread(traced.wait_for, whole, ARRIVE_S, "connected spans of all processes")
    spans = collector.tree_of(name)
    assert len({span.span_id for span in spans}) == len(spans)
    [root] = roots(spans)
    assert root.parent_span_id == b"" and root.name.startswith("text_completion")
