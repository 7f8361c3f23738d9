"""The stages of a trace add up to the time that the client waited, and all spans have the same trace id."""

import asyncio
import uuid
from collections import defaultdict
from typing import Any

from baton.client import AsyncBatonClient
from tests.e2e.stack import Stack

AT_A_TIME, MOST_REQUESTS, RIGHT = 10, 200, 10
TRACE_WRITTEN_S = 30.0
TTFT = ("router_queue", "route", "prefill_fetch", "prefill_queue", "prefill", "return")
TOKEN_GAP = ("transfer_exposed", "decode_admission", "first_step")
STAGES = {"router.queue", "route.select", "prefill.queue", "prefill.chunk", "return", "kv.transfer", "decode"}


def holds(root: dict[str, Any], total: str, parts: tuple[str, ...]) -> bool:
    measured = root[f"baton.{total}_ms"]
    return abs(sum(root[f"baton.{part}_ms"] for part in parts) - measured) <= max(2.0, 0.03 * measured)


def spans_by_trace(stack: Stack) -> dict[str, list[dict[str, Any]]]:
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in stack.spans():
        traces[span["trace_id"]].append(span)
    return traces


def is_root(span: dict[str, Any], request_ids: set[str]) -> bool:
    return span["attributes"].get("gen_ai.response.id") in request_ids


async def trace_more(stack: Stack) -> list[dict[str, Any]]:
    """Send some requests, check their stages, and return their root spans."""
    asked = {f"sums-{uuid.uuid4().hex}" for _ in range(AT_A_TIME)}
    async with AsyncBatonClient(stack.target, timeout_s=30) as baton:
        for index, name in enumerate(asked):
            await baton.complete([3 + index] * 100, max_tokens=5, ignore_eos=True, cache_salt=name, request_id=name)

    def written() -> dict[str, list[dict[str, Any]]]:
        return {
            key: spans for key, spans in spans_by_trace(stack).items() if any(is_root(span, asked) for span in spans)
        }

    def whole() -> bool:
        return sum({span["name"] for span in spans} >= STAGES for spans in written().values()) == AT_A_TIME

    await asyncio.to_thread(stack.wait_for, whole, TRACE_WRITTEN_S, "traces with all their stages")
    traces = written()
    roots = [span["attributes"] for spans in traces.values() for span in spans if span["parent_span_id"] is None]
    assert len(roots) == AT_A_TIME
    return roots


async def test_both_sums_hold_for_requests_that_no_other_process_holds_up(stack: Stack) -> None:
    """A busy machine needs more requests: time that a process waits for a core between two stages is in neither."""
    roots: list[dict[str, Any]] = []
    wanted = {"ttft": TTFT, "token_gap": TOKEN_GAP}
    while any(sum(holds(root, total, parts) for root in roots) < RIGHT for total, parts in wanted.items()):
        assert len(roots) < MOST_REQUESTS, roots
        roots += await trace_more(stack)
