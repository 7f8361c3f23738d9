"""Latency objectives of commands, as the engine gets them."""

import math
from typing import Any

import pytest

from baton.engine.request import Objectives
from baton.protos import session_pb2
from baton.worker.wire import objectives_of

ARRIVED_S, DEADLINE_S, TBT_S = 100.0, 160.0, 0.05


@pytest.mark.parametrize(
    ("fields", "objectives"),
    [
        ({"first_token_in_ms": 1500, "tbt_slo_ms": 30, "ttft_slo_ms": 2000}, Objectives(101.5, 0.03, 2.0, DEADLINE_S)),
        ({"first_token_in_ms": -500, "ttft_slo_ms": 2000}, Objectives(99.5, TBT_S, 2.0, DEADLINE_S)),
        ({"first_token_in_ms": 0, "ttft_slo_ms": 2000}, Objectives(ARRIVED_S, TBT_S, 2.0, DEADLINE_S)),
        ({}, Objectives(math.inf, TBT_S)),
    ],
)
@pytest.mark.parametrize("kind", [session_pb2.Start, session_pb2.Prefill])
def test_command_objectives_count_from_its_arrival(kind: Any, fields: dict[str, int], objectives: Objectives) -> None:
    assert objectives_of(kind(**fields, time_left_ms=60_000), ARRIVED_S, TBT_S) == objectives
