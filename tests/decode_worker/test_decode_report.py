"""What a decode worker tells of its rates, and what a router reads of that."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.loop import DecodeLoad, DecodeLoop
from decode_worker.report import decode_report
from decode_worker.worker_credits import Limit
from engine.pages import PageCounts
from engine.step_budget import PromptRates
from protos import report_pb2
from router.session_wire import worker_report
from worker.transfer_reader import Integrity, TransferReader


def reported(rates: PromptRates) -> report_pb2.Report:
    load = DecodeLoad(PageCounts(8, 8, 0, 0), 0, 0, 0, 0, 0, 0, 0, 0, 0, rates)
    loop: Any = SimpleNamespace(load=load, steps=1)
    reader: Any = SimpleNamespace(links=(), integrity=Integrity())
    return decode_report(
        cast(DecodeLoop, loop), cast(TransferReader, reader), Limit(8, 1), 0, False, report_pb2.CacheSum()
    )


@pytest.mark.parametrize("rates", [PromptRates(None, None), PromptRates(900.0, None), PromptRates(900.0, 40.0)])
def test_both_rates_come_to_the_router_or_are_not_known(rates: PromptRates) -> None:
    read = worker_report(reported(rates))
    assert (read.alone_tokens_per_s, read.beside_tokens_per_s) == rates
