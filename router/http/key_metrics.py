"""/metrics by API key: which key sends the load, and how near each is to its limits. The label is the key's name.

Only a router with keys has this: without them, what a caller shows for a key is anything, and no name. The series are
bounded: of names that were seen beside those of the key file, the first MAX_NAMES have their own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.process.security.api_keys import KeyLimits
from baton.router.http import metric_families as declared
from baton.router.http.metric_families import Histogram
from baton.router.http.metrics import trace_link
from baton.router.trace.record import Outcome, RequestRecord, stages

MAX_NAMES = 200
OTHERS = "(others)"
"""Not the name of any key: those have no parentheses."""
_LIMITS = tuple(field.name for field in fields(KeyLimits))


class KeyMetrics(Collector):
    """`observe` is called with every request that has ended."""

    def __init__(self, limits: Callable[[], Mapping[str, KeyLimits]], running: Callable[[], Counter[str]]) -> None:
        """`limits` of all present keys by name; `running`: the number of requests by name."""
        self._limits = limits
        self._running = running
        self._names: set[str] = set()
        self._ended: Counter[tuple[str, Outcome]] = Counter()
        self._limited: Counter[tuple[str, str]] = Counter()  # by key and limit
        self._prompt_tokens: Counter[str] = Counter()
        self._generated_tokens: Counter[str] = Counter()
        self._ttft: dict[str, Histogram] = {}

    def observe(self, record: RequestRecord) -> None:
        """A call that was refused before its key was read has none, and is not counted here."""
        if not record.tenant or record.end is None:
            return
        name = self._label(record.tenant)
        self._ended[name, record.end.outcome] += 1
        if record.end.outcome is Outcome.REFUSED and record.end.reason in _LIMITS:
            self._limited[name, record.end.reason] += 1
        self._prompt_tokens[name] += record.prompt_tokens
        self._generated_tokens[name] += record.completion_tokens
        timeline = record.timeline
        if timeline.first_token_s is not None:
            ttft = self._ttft.setdefault(name, Histogram(declared.KEY_TTFT.bounds))
            ttft.observe(stages(timeline, timeline.first_token_s).ttft_ms / 1e3, trace_link(record))

    def collect(self) -> Iterator[Metric]:
        limits = self._limits()
        for name in limits:
            self._label(name)
        names = sorted(self._names)
        yield from self._counts(names)
        active, running = declared.KEY_ACTIVE.empty(), Counter[str]()
        for name, count in self._running().items():
            if name:
                running[self._label(name)] += count
        for name in sorted({*names, *running}):
            active.add_metric((name,), running[name])
        yield active
        ttft = declared.KEY_TTFT.empty()
        for name, histogram in self._ttft.items():
            ttft.add_metric((name,), histogram.cumulative, histogram.total)
        yield ttft
        limit_values = declared.KEY_LIMITS.empty()
        for name in self._names & limits.keys():
            for limit in _LIMITS:
                if (value := getattr(limits[name], limit)) is not None:
                    limit_values.add_metric((name, limit), value)
        yield limit_values

    def _counts(self, names: list[str]) -> Iterator[Metric]:
        """Also 0, for each name: the growth of a series that begins at 1 is unknown."""
        ended, limited = declared.KEY_REQUESTS.empty(), declared.KEY_LIMITED.empty()
        prompts, answers = declared.KEY_PROMPT_TOKENS.empty(), declared.KEY_GENERATED_TOKENS.empty()
        for name in (*names, *([OTHERS] if any(key == OTHERS for key, _ in self._ended) else [])):
            for outcome in Outcome:
                ended.add_metric((name, outcome.value), self._ended[name, outcome])
            for limit in _LIMITS:
                limited.add_metric((name, limit), self._limited[name, limit])
            prompts.add_metric((name,), self._prompt_tokens[name])
            answers.add_metric((name,), self._generated_tokens[name])
        yield from (ended, limited, prompts, answers)

    def _label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= MAX_NAMES:
                return OTHERS
            self._names.add(name)
        return name
