"""Streams that clients resumed here, and the records written so that others can be resumed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from baton.router.request.journal import Journal
from baton.router.request.resume import Streams


@dataclass(frozen=True, slots=True)
class StreamMetrics:
    """`journal` None: there is no Redis, and nothing is written."""

    streams: Streams
    journal: Journal | None

    def collect(self) -> Iterator[Metric]:
        resumed = "Streams that a client resumed here, after its router or its connection was gone."
        yield CounterMetricFamily("baton:client_resumes", resumed, value=self.streams.resumed)
        if self.journal is None:
            return
        counts = CounterMetricFamily("baton:journal_records", "By what became of writing them.", labels=("outcome",))
        for outcome, count in asdict(self.journal.counts).items():
            counts.add_metric((outcome,), count)
        yield counts
