"""What a decode worker tells of its rates, and what a router reads of that."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.engine.kv_cache.block_pool import BlockCounts
from baton.engine.kv_cache.eviction import SessionCounts
from baton.engine.runner.loop import EngineLoad, EngineLoop
from baton.engine.scheduler.budget import PromptRates
from baton.engine.scheduler.speculation import Speculated
from baton.protos import report_pb2
from baton.router.fleet.wire import worker_report as read_report
from baton.router.types.worker import SessionReport
from baton.worker.at_rest.sums import RestCounters
from baton.worker.transfer.reader import Integrity, TransferReader
from baton.worker.wire import Limit, worker_report

SESSIONS = SessionCounts(3, 5, 7, 9, 11, 13, 15)


def reported(rates: PromptRates) -> report_pb2.Report:
    load = EngineLoad(BlockCounts(8, 8, 0, 0), 0, 0, 0, 0, 0, 0, 0, 0, 0, rates, Speculated(), SESSIONS)
    loop: Any = SimpleNamespace(load=load, steps=1)
    reader: Any = SimpleNamespace(links=(), integrity=Integrity())
    return worker_report(
        cast(EngineLoop, loop),
        cast(TransferReader, reader),
        Limit(8, 1),
        0,
        False,
        report_pb2.CacheSum(),
        RestCounters(5, 2),
        None,
        17,
    )


@pytest.mark.parametrize("rates", [PromptRates(None, None), PromptRates(900.0, None), PromptRates(900.0, 40.0)])
def test_both_rates_reach_the_router_or_are_unknown(rates: PromptRates) -> None:
    read = read_report(reported(rates))
    assert (read.checked_at_rest_blocks, read.corrupt_at_rest_blocks) == (5, 2)
    assert (read.alone_tokens_per_s, read.beside_tokens_per_s) == rates


def test_session_counts_of_a_worker_reach_the_router() -> None:
    assert read_report(reported(PromptRates(None, None))).sessions == SessionReport(3, 5, 7, 9, 11, 13, 15, 17)
    assert read_report(report_pb2.Report()).sessions == SessionReport()
