"""Collector of metrics by API key: how much load each key causes, and how close it is to its limits.

The label is the key's name. Without configured keys there is no collector, since callers could send anything as a key.
The number of series is bounded: only the first MAX_NAMES names have series of their own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.process.security.api_keys import KeyLimits
from baton.router.http import metric_families as declared
from baton.router.http.metrics import trace_link
from baton.router.trace.record import RequestOutcome, RequestRecord, stages

MAX_NAMES = 200
OTHERS = "(others)"
"""Label of all names after the first MAX_NAMES. No key has this name, since parentheses are invalid in it."""
_LIMITS = tuple(field.name for field in fields(KeyLimits))


class KeyMetrics(Collector):
    """Collector of metrics by API key. Call `observe` with every finished request."""

    def __init__(self, limits: Callable[[], Mapping[str, KeyLimits]], running: Callable[[], Counter[str]]) -> None:
        """Create the metrics. By name of the key: `limits` returns the limits of current keys, `running` the number of
        running requests.
        """
        self._limits = limits
        self._running = running
        self._names: set[str] = set()
        self._ended, self._limited = declared.KEY_REQUESTS.counter(), declared.KEY_LIMITED.counter()
        self._prompt_tokens = declared.KEY_PROMPT_TOKENS.counter()
        self._generated_tokens = declared.KEY_GENERATED_TOKENS.counter()
        self._ttft = declared.KEY_TTFT.histogram()

    def observe(self, record: RequestRecord) -> None:
        """Count a finished request. A request that was rejected before its key was read does not count."""
        if not record.tenant or record.end is None:
            return
        name = self._label(record.tenant)
        self._ended.labels(name, record.end.outcome.value).inc()
        if record.end.outcome is RequestOutcome.REFUSED and record.end.reason in _LIMITS:
            self._limited.labels(name, record.end.reason).inc()
        self._prompt_tokens.labels(name).inc(record.prompt_tokens)
        self._generated_tokens.labels(name).inc(record.completion_tokens)
        timeline = record.timeline
        if timeline.first_token_s is not None:
            ttft_s = stages(timeline, timeline.first_token_s).ttft_ms / 1e3
            self._ttft.labels(name).observe_all([ttft_s], trace_link(record))

    def collect(self) -> Iterator[Metric]:
        limits = self._limits()
        for name in limits:
            self._label(name)
        for metric in (self._ended, self._limited, self._prompt_tokens, self._generated_tokens, self._ttft):
            yield from metric.collect()
        active = Counter[str](dict.fromkeys(self._names, 0))
        for name, count in self._running().items():
            if name:
                active[self._label(name)] += count
        yield declared.KEY_ACTIVE.filled({(name,): count for name, count in sorted(active.items())})
        yield declared.KEY_LIMITS.filled(
            {
                (name, limit): value
                for name in self._names & limits.keys()
                for limit in _LIMITS
                if (value := getattr(limits[name], limit)) is not None
            }
        )

    def _label(self, name: str) -> str:
        """Return the label for a key. Create its counters as zeros, so that Prometheus sees their first increase."""
        if name in self._names:
            return name
        is_known = len(self._names) < MAX_NAMES
        if is_known:
            self._names.add(name)
        label = name if is_known else OTHERS
        for outcome in RequestOutcome:
            self._ended.labels(label, outcome.value)
        for limit in _LIMITS:
            self._limited.labels(label, limit)
        self._prompt_tokens.labels(label)
        self._generated_tokens.labels(label)
        return label
