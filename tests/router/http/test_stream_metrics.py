"""What /metrics says of resumed streams and of the journal."""

from prometheus_client import CollectorRegistry, generate_latest

from baton.router.http.metrics import StreamMetrics
from baton.router.request.journal import Journal, JournalStore, Streams


class NoStore(JournalStore):
    async def close(self) -> None: ...


def told(metrics: StreamMetrics) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_what_became_of_records_is_counted_by_outcome() -> None:
    journal = Journal(NoStore(), b"r" * 16, lambda record: b"", lambda stream: None)  # type: ignore[abstract]
    journal.counts.written, journal.counts.dropped = 5, 2
    streams = Streams(b"r" * 16, journal, lambda router_id, stream: None)
    streams.resumed = 3
    text = told(StreamMetrics(streams, journal))
    assert "baton:client_resumes_total 3.0" in text
    assert 'baton:journal_records_total{outcome="written"} 5.0' in text
    assert 'baton:journal_records_total{outcome="dropped"} 2.0' in text


def test_without_redis_there_is_no_journal_to_tell_of() -> None:
    text = told(StreamMetrics(Streams(b"r" * 16, None, lambda router_id, stream: None), None))
    assert "baton:client_resumes_total 0.0" in text
    assert "journal" not in text
