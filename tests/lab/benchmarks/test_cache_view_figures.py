"""Figures of the router's cache view from a trace."""

import json
from typing import Any

from tests.fixtures.cache_predictions import figures, read_spans


def span(**told: Any) -> dict[str, Any]:
    return {"name": "route.select", "attributes": {f"baton.route.{name}": value for name, value in told.items()}}


def prefill(hit: int, ready: int, cached: int) -> dict[str, int]:
    return {"prefill_hit_tokens": hit, "prefill_ready_tokens": ready, "prefill_cached_tokens": cached}


def test_request_is_equal_if_it_is_on_every_worker_that_looked_it_up() -> None:
    found = figures(
        [
            span(**prefill(64, 64, 64), decode_hit_tokens=32, decode_cached_tokens=32),
            span(**prefill(64, 64, 64), decode_hit_tokens=32, decode_cached_tokens=64),
            span(decode_hit_tokens=32, decode_cached_tokens=32),
            span(prefill_hit_tokens=32, prefill_ready_tokens=0, decode_hit_tokens=0),  # nobody answered
            {"name": "return", "attributes": {}},
        ]
    )
    assert (found.requests, found.equal, found.prefill.requests, found.decode.requests) == (3, 2, 2, 3)
    assert found.decode.causes == {"more had come": 1}


def test_expected_and_present_blocks_are_distinguished() -> None:
    found = figures([span(**prefill(64, 0, 0)), span(**prefill(64, 64, 32))])
    assert found.prefill.causes == {"a prompt in flight did not bring it": 1, "evicted meanwhile": 1}


def test_half_written_line_of_a_trace_is_left_out() -> None:
    assert read_spans(json.dumps({"name": "a"}) + "\n" + '{"na') == [{"name": "a"}]
