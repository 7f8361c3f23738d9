"""The state of a decode worker, as its routers receive it."""

from dataclasses import asdict

from baton.engine.runner.loop import EngineLoop
from baton.protos import report_pb2
from baton.worker.decode.credits import Limit
from baton.worker.transfer.reader import TransferReader
from baton.worker.wire import link_reports, page_counts


def decode_report(
    loop: EngineLoop,
    reader: TransferReader,
    limit: Limit,
    waiting_requests: int,
    draining: bool,
    cache: report_pb2.CacheSum,
) -> report_pb2.Report:
    """`limit`: of the router that receives it. `waiting_requests`: those that the engine does not know yet."""
    load = loop.load
    return report_pb2.Report(
        limit_blocks=limit.blocks,
        limit_slots=limit.slots,
        pages=page_counts(load),
        waiting_requests=waiting_requests + load.waiting_sequences,
        running_sequences=load.running_sequences,
        pending_tokens=load.pending_tokens,
        draining=draining,
        steps=loop.steps,
        cache_query_tokens=load.cache_query_tokens,
        cache_hit_tokens=load.cache_hit_tokens,
        preemptions=load.preemptions,
        unfilled_slots=load.unfilled_slots,
        links=link_reports(reader.links),
        cache=cache,
        alone_tokens_per_s=load.rates.alone_tokens_per_s or 0.0,
        beside_tokens_per_s=load.rates.beside_tokens_per_s or 0.0,
        **asdict(reader.integrity),
    )
