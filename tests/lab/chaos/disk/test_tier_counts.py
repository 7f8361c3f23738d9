"""Counters of the workers' disk tiers are summed over restarts."""

from baton.lab.chaos.disk.counts import TierCounts, read_metrics

METRICS = """# HELP baton:kv_tier_hits_total Of those, the ones that were loaded from files.
baton:kv_tier_hits_total{engine="decode-0",model_name="tiny"} 12.0
baton:kv_tier_hits_total{engine="prefill-0",model_name="tiny"} 3.0
baton:kv_tier_reads{engine="decode-0",model_name="tiny"} 1.0
baton:kv_tier_stored_bytes_total{engine="decode-0",model_name="tiny"} 1.5e+06
baton:kv_at_rest_checked_blocks_total{engine="decode-0",model_name="tiny"} 7.0
baton:kv_blocks{engine="decode-0",model_name="tiny"} 4.0
"""


def of(hits: float, reads: float = 1.0, writes: float = 1.0) -> dict[str, dict[str, float]]:
    return {"decode-0": {"hits": hits, "reads": reads, "writes": writes, "blocks": 9.0}}


def test_metrics_are_read_by_worker() -> None:
    assert read_metrics(METRICS) == {
        "decode-0": {"hits": 12.0, "reads": 1.0, "stored_bytes": 1.5e6, "at_rest_checked_blocks": 7.0},
        "prefill-0": {"hits": 3.0},
    }


def test_worker_that_was_started_again_counts_on() -> None:
    counts = TierCounts()
    for hits in (5, 7, 2, 2, 6):
        counts.take(of(hits))
    assert counts.totals["hits"] == 7 + 6
    assert "blocks" not in counts.totals


def test_outage_is_counted_once_and_known_until_recovery() -> None:
    counts = TierCounts()
    counts.take(of(0))
    for _ in range(3):
        counts.take(of(0, writes=0.0))
    assert counts.off == {"decode-0": "writes"}
    counts.take(of(0, reads=0.0, writes=0.0))
    assert counts.off == {"decode-0": "reads, writes"}
    counts.take(of(0))
    assert counts.off == {}
    assert counts.turned_off == {"reads": 1, "writes": 1}
