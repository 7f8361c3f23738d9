"""Prometheus alert rules for the failures in docs/reliability.md. Each rule names rows of that page's table of faults.

Prometheus sees no growth when a counter first appears, so routers report counters as 0 from the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml  # type: ignore[import-untyped]

from baton.lab.dashboards.dashboards import counter, gauge, histogram
from baton.lab.dashboards.promql import growth, quantile, rate, selector, value
from baton.router.admission.queue import NO_TIME, QUEUE_FULL
from baton.router.http import metric_families as m
from baton.router.trace.record import Leave
from baton.router.types.events import FailureReason

PAGE = "docs/reliability.md"
FAULTS, CALLER, OPERATOR = "the-fault-matrix", "what-a-caller-sees", "what-an-operator-sees"
"""Anchors of sections in PAGE."""
JOB = "baton"
"""Prometheus job of the routers."""

NOT_ALERTED: Mapping[int, str] = {
    2: "the same sign as 1",
    3: "the same sign as 1",
    5: "a drain is wanted, and no request fails; the dashboard of the workers counts them",
    7: "the same sign as 6",
    8: "blocks come back by themselves; the death itself is that of 1",
    12: "the same sign as 11",
    14: "found again within 2 s; a Redis that stays away is 13",
    16: "cancels are the right of a client",
    18: "bad input is the client's; its requests are refused by reason on the overview",
    19: "bad input is the client's; its requests are refused by reason on the overview",
    27: "nothing depends on the wall clock",
    31: "such a worker is never paired; too few workers are 9 and 10",
    32: "no effect on requests; missing traces and scrapes are seen where they are missed",
    33: "nothing is left in shared memory that a metric could count",
    34: "memory of a process is a metric of its machine, not of Baton",
    35: "does not happen in practice, and cannot be seen",
    38: "the deaths themselves are those of 1 and 6",
    39: "the prompt is computed; the death itself is that of 1",
}
"""Rows of the table of faults without an alert, with the reason."""


class Severity(Enum):
    PAGE = "page"  # requests fail or will soon
    TICKET = "ticket"  # something is broken, but requests are served


@dataclass(frozen=True, slots=True)
class Alert:
    """Alert that fires when its expression has had a result for `lasting`, a Prometheus duration (0s: immediately)."""

    name: str
    summary: str  # one sentence; {{ $labels.engine }} and {{ $value }} are filled in
    expression: str
    severity: Severity
    rows: tuple[int, ...]  # rows of the table of faults that the alert reports
    lasting: str = "0s"
    section: str = FAULTS

    def as_rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity.value},
            "annotations": {
                "summary": self.summary,
                "faults": ", ".join(map(str, self.rows)),
                "runbook": f"{PAGE}#{self.section}",
            },
        }


def _grows(name: str, window: str, by: tuple[str, ...] = ("engine",), **matchers: str) -> str:
    return f"{growth(counter(name), by, matchers, window)} > 0"


_ENDED = rate(m.REQUESTS_ENDED, window="5m")
_FAILED = rate(m.REQUESTS_ENDED, (), {"outcome": "failed"}, "5m")
_NO_ROOM_REASONS = "|".join(("max_active", "no_room", QUEUE_FULL, NO_TIME))
_NO_ROOM = rate(m.REQUESTS_ENDED, (), {"outcome": "refused", "reason": f"~{_NO_ROOM_REASONS}"}, "5m")
_LATE = rate(m.REQUESTS_ENDED, (), {"reason": "deadline_exceeded"}, "5m")
_NOT_FINITE, _TRANSFER = FailureReason.NONFINITE.name.lower(), FailureReason.TRANSFER.name.lower()
_UP = f'up{{job="{JOB}"}}'
_PREFILL = selector(m.WORKERS.name, m.WORKERS, {"role": "prefill"})
_DECODE = selector(m.WORKERS.name, m.WORKERS, {"role": "decode"})
_HELD = value(gauge("vllm:kv_cache_usage_perc"), ("engine",))
_PREEMPTED = rate(counter("vllm:num_preemptions"), ("engine",), window="5m")
_PENDING = value(gauge("baton:pending_tokens"), ("engine",))
_STEPS = rate(counter("baton:steps"), ("engine",), window="1m")
_READS, _WRITES = (value(gauge(f"baton:kv_tier_{way}"), ("engine",)) for way in ("reads", "writes"))
_GAP = quantile(0.99, histogram("baton:resume_gap_seconds"), window="10m")

ALERTS = (
    Alert(
        "BatonRouterGone",
        "No router, or not all of them, can be scraped: clients of that router cannot reach it either.",
        f"{_UP} == 0 or absent({_UP})", Severity.PAGE, (11,), "30s", CALLER,
    ),
    Alert(
        "BatonNotReady",
        "A readiness probe through prefill, transfer and decode has not come back for a minute.",
        f"{m.READY.name} == 0", Severity.PAGE, (10,), "1m", CALLER,
    ),
    Alert(
        "BatonNoDecodeWorker",
        "No decode worker has a session: requests wait, and fail after 10 s.",
        f"{_DECODE} == 0", Severity.PAGE, (10,), "15s",
    ),
    Alert(
        "BatonNoPrefillWorker",
        "The prefill workers of the last hour are gone: decode workers compute the prompts, and answers get slower.",
        f"{_PREFILL} == 0 and max_over_time({_PREFILL}[1h]) > 0", Severity.PAGE, (9,), "30s",
    ),
    Alert(
        "BatonWorkerDied",
        "The process of {{ $labels.engine }} was found gone without a drain. Its answers went on elsewhere.",
        _grows("baton:worker_deaths", "10m"), Severity.TICKET, (1, 6), section=OPERATOR,
    ),
    Alert(
        "BatonWorkerCrashLoop",
        "{{ $labels.engine }} died more than three times in 15 minutes.",
        f"{growth(m.DEPARTURES['deaths'], ('engine',), window='15m')} > 3", Severity.PAGE, (29,), section=OPERATOR,
    ),
    Alert(
        "BatonSessionLost",
        "A router lost its session with {{ $labels.engine }}, whose process may live: it was stopped, or cut off.",
        _grows("baton:worker_lost_sessions", "10m"), Severity.TICKET, (25, 26, 40, 41), section=OPERATOR,
    ),
    Alert(
        "BatonEngineStands",
        "{{ $labels.engine }} has prompt tokens to compute and has made no step for a minute.",
        f"{_PENDING} > 0 and on (engine) {_STEPS} == 0", Severity.PAGE, (30,), "30s", OPERATOR,
    ),
    Alert(
        "BatonRegistryLost",
        "Redis does not answer a router. Requests are served; new workers are not found.",
        f"{m.REGISTRY_CONNECTED.name} == 0", Severity.TICKET, (13,), "30s", OPERATOR,
    ),
    Alert(
        "BatonJournalLosesRecords",
        "Records of streams are not written: streams without a record may not survive their router.",
        f"{growth(m.JOURNAL_RECORDS, (), {'outcome': '~dropped|failed'}, '10m')} > 0", Severity.TICKET, (11, 13),
    ),
    Alert(
        "BatonCorruptKv",
        "KV blocks that {{ $labels.engine }} read differ from their source: memory or a link damages data.",
        _grows("baton:kv_checksum_mismatches", "1h"), Severity.PAGE, (23,), section=OPERATOR,
    ),
    Alert(
        "BatonCachedKvChanged",
        "KV in the memory of {{ $labels.engine }} changed while it lay there: its machine's memory fails.",
        _grows("baton:kv_at_rest_corrupt_blocks", "1h"), Severity.PAGE, (23,), section=OPERATOR,
    ),
    Alert(
        "BatonKvFilesFail",
        "{{ $labels.engine }} does not read or write the files of --kv-tier-dir: their disk is full, fails or hangs.",
        f"{_READS} == 0 or {_WRITES} == 0", Severity.TICKET, (36,), "5m", OPERATOR,
    ),
    Alert(
        "BatonKvFilesDamaged",
        "KV in files of {{ $labels.engine }} is damaged: its disk or memory does not keep what it is given.",
        _grows("baton:kv_tier_corrupt_blocks", "1h"), Severity.TICKET, (37,), section=OPERATOR,
    ),
    Alert(
        "BatonLogitsNotFinite",
        "A model computed values that are not finite. Those requests failed; others did not notice.",
        _grows("baton:attempts_failed", "1h", (), reason=_NOT_FINITE), Severity.TICKET, (22,), section=OPERATOR,
    ),
    Alert(
        "BatonTransfersFail",
        "KV transfers between workers keep failing: a partition, or a source that is gone.",
        f"{growth(m.ATTEMPTS_FAILED, (), {'reason': _TRANSFER}, '5m')} > 3", Severity.TICKET, (24,), "2m",
    ),
    Alert(
        "BatonDeadlyRequest",
        "A request killed each worker that computed it, and is refused for ten minutes.",
        _grows("baton:requests_ended", "1h", (), outcome="failed", reason="poison"), Severity.PAGE, (28,),
        section=CALLER,
    ),
    Alert(
        "BatonRequestsFail",
        "More than 1 % of the requests failed in the last five minutes.",
        f"{_FAILED} / {_ENDED} > 0.01", Severity.PAGE, (4,), "1m", CALLER,
    ),
    Alert(
        "BatonSlowResumes",
        "Answers that went on with another worker stood still for more than 5 s (p99).",
        f"{_GAP} > 5", Severity.TICKET, (1, 26),
    ),
    Alert(
        "BatonOverload",
        "More than 5 % of the requests are refused for want of room.",
        f"{_NO_ROOM} / {_ENDED} > 0.05", Severity.PAGE, (21,), "2m", CALLER,
    ),
    Alert(
        "BatonDeadlines",
        "More than 5 % of the requests passed their deadline.",
        f"{_LATE} / {_ENDED} > 0.05", Severity.TICKET, (17,), "5m", CALLER,
    ),
    Alert(
        "BatonPoolFull",
        "The KV pool of {{ $labels.engine }} is full, and answers are preempted.",
        f"{_HELD} > 0.9 and on (engine) {_PREEMPTED} > 0", Severity.TICKET, (20,), "5m", CALLER,
    ),
    Alert(
        "BatonSlowReaders",
        "Clients are disconnected because they read nothing of their answers for 30 s.",
        f"{growth(m.REQUESTS_ENDED, (), {'reason': Leave.STALLED.value}, '10m')} > 5", Severity.TICKET, (15,),
    ),
)  # fmt: skip


def rules_text() -> str:
    """Return the rules file for Prometheus."""
    return _as_file(_groups())


def rules_object_text() -> str:
    """Return the same rules as a Kubernetes object for the Prometheus Operator."""
    labels = {"app.kubernetes.io/part-of": JOB}
    metadata = {"name": JOB, "namespace": JOB, "labels": labels}
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    return _as_file({**kind, "metadata": metadata, "spec": _groups()})


def _groups() -> dict[str, Any]:
    return {"groups": [{"name": "baton", "rules": [alert.as_rule() for alert in ALERTS]}]}


def _as_file(content: dict[str, Any]) -> str:
    dumped: str = yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)
    return "# Written by `.venv/bin/python -m baton.lab.dashboards`; tests compare it.\n" + dumped
