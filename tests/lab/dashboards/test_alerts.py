"""The committed alert rules use metrics that exist, cover each fault, and fire when they should."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from baton.lab.dashboards.__main__ import RULES
from baton.lab.dashboards.alerts import ALERTS, NOT_ALERTED
from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.queue import NO_TIME, QUEUE_FULL
from baton.router.http.metrics import COUNTED_FAILURES
from baton.router.trace.record import Leave, RequestOutcome
from baton.router.types.events import FailureReason
from tests.fixtures.prometheus import promtool
from tests.lab.dashboards.expressions import faults, selectors

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ENDED = "baton:requests_ended_total"
OK, WORKER = f'{ENDED}{{outcome="answered",reason=""}}', '{engine="decode-0"}'
OF_MODEL = '{engine="decode-0",model_name="m"}'
GAP = "baton:resume_gap_seconds_bucket"

FIRES: Mapping[str, Mapping[str, str]] = {
    "BatonRouterGone": {'up{job="baton",instance="r"}': "1x20 0x60"},
    "BatonNotReady": {"baton:ready": "1x20 0x60"},
    "BatonNoDecodeWorker": {'baton:workers{role="decode"}': "1x20 0x60"},
    "BatonNoPrefillWorker": {'baton:workers{role="prefill"}': "2x20 0x60"},
    "BatonWorkerDied": {f"baton:worker_deaths_total{WORKER}": "0x60 1x20"},
    "BatonWorkerCrashLoop": {f"baton:worker_deaths_total{WORKER}": "0x40 1+1x40"},
    "BatonSessionLost": {f"baton:worker_lost_sessions_total{WORKER}": "0x60 1x20"},
    "BatonEngineStands": {
        f"baton:pending_tokens{OF_MODEL}": "100x80", f"baton:steps_total{OF_MODEL}": "0+10x40 400x40",
    },
    "BatonRegistryLost": {"baton:registry_connected": "1x20 0x60"},
    "BatonJournalLosesRecords": {'baton:journal_records_total{outcome="dropped"}': "0x60 3x20"},
    "BatonCorruptKv": {f"baton:kv_checksum_mismatches_total{OF_MODEL}": "0x60 1x20"},
    "BatonCachedKvChanged": {f"baton:kv_at_rest_corrupt_blocks_total{OF_MODEL}": "0x60 1x20"},
    "BatonKvFilesFail": {f"baton:kv_tier_reads{OF_MODEL}": "1x80", f"baton:kv_tier_writes{OF_MODEL}": "1x20 0x60"},
    "BatonKvFilesDamaged": {f"baton:kv_tier_corrupt_blocks_total{OF_MODEL}": "0x60 1x20"},
    "BatonLogitsNotFinite": {'baton:attempts_failed_total{reason="nonfinite"}': "0x60 1x20"},
    "BatonTransfersFail": {'baton:attempts_failed_total{reason="transfer"}': "0+1x80"},
    "BatonDeadlyRequest": {f'{ENDED}{{outcome="failed",reason="poison"}}': "0x60 1x20"},
    "BatonRequestsFail": {OK: "0+98x80", f'{ENDED}{{outcome="failed",reason="worker_lost"}}': "0+2x80"},
    "BatonSlowResumes": {f'{GAP}{{le="5.0"}}': "0x80", f'{GAP}{{le="7.5"}}': "0+1x80", f'{GAP}{{le="+Inf"}}': "0+1x80"},
    "BatonOverload": {OK: "0+9x80", f'{ENDED}{{outcome="refused",reason="{QUEUE_FULL}"}}': "0+1x80"},
    "BatonDeadlines": {OK: "0+9x80", f'{ENDED}{{outcome="failed",reason="deadline_exceeded"}}': "0+1x80"},
    "BatonPoolFull": {
        f"vllm:kv_cache_usage_perc{OF_MODEL}": "0.95x80", f"vllm:num_preemptions_total{OF_MODEL}": "0+1x80",
    },
    "BatonSlowReaders": {f'{ENDED}{{outcome="cancelled",reason="{Leave.STALLED}"}}': "0+1x80"},
}  # fmt: skip
"""By alert, series of which it fires within 20 minutes: values every 15 s, as promtool has them."""
HEALTHY = {
    'up{job="baton",instance="r"}': "1x80",
    "baton:ready": "1x80",
    "baton:registry_connected": "1x80",
    'baton:workers{role="prefill"}': "0x80",  # decode workers compute prompts themselves
    'baton:workers{role="decode"}': "1x80",
    f"baton:worker_deaths_total{WORKER}": "2x80",  # long ago
    f"baton:worker_lost_sessions_total{WORKER}": "0x80",
    f"baton:pending_tokens{OF_MODEL}": "100x80",
    f"baton:steps_total{OF_MODEL}": "0+1x80",
    f"baton:kv_checksum_mismatches_total{OF_MODEL}": "0x80",
    f"baton:kv_at_rest_corrupt_blocks_total{OF_MODEL}": "0x80",
    f"baton:kv_tier_reads{OF_MODEL}": "1x80",
    f"baton:kv_tier_writes{OF_MODEL}": "1x80",
    f"baton:kv_tier_corrupt_blocks_total{OF_MODEL}": "0x80",
    f"vllm:kv_cache_usage_perc{OF_MODEL}": "0.95x80",
    f"vllm:num_preemptions_total{OF_MODEL}": "0x80",
    'baton:attempts_failed_total{reason="nonfinite"}': "0x80",
    'baton:attempts_failed_total{reason="transfer"}': "0x40 1x40",
    'baton:journal_records_total{outcome="dropped"}': "0x80",
    OK: "0+100x80",
    f'{ENDED}{{outcome="failed",reason="poison"}}': "0x80",
    f'{ENDED}{{outcome="refused",reason="{NO_TIME}"}}': "0+1x80",
    f'{GAP}{{le="5.0"}}': "0+1x80",
    f'{GAP}{{le="+Inf"}}': "0+1x80",
}


def rules() -> list[Any]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    found: list[Any] = group["rules"]
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings."""
    return {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
    }


def test_every_name_and_label_of_a_rule_is_declared() -> None:
    assert [fault for rule in rules() for fault in faults(rule["expr"])] == []


def test_every_value_matched_by_a_rule_is_written_by_a_router() -> None:
    known = {
        "outcome": {*map(str, RequestOutcome), "written", "dropped", "failed", "too_large"},
        "reason": {*(each.name.lower() for each in FailureReason), *COUNTED_FAILURES, *map(str, Leave)}
        | {QUEUE_FULL, NO_TIME, "no_room", "max_active"},
        "role": set(map(str, WorkerRole)),
        "job": {"baton"},
    }
    for rule in rules():
        for _, matched in selectors(rule["expr"]):
            for label, values in matched.items():
                assert set(values.split("|")) <= known[label], (rule["alert"], label)


def test_every_rule_has_a_sentence_and_a_link() -> None:
    for rule in rules():
        notes = rule["annotations"]
        assert notes["summary"].endswith(".") and len(notes["summary"]) > 30, rule["alert"]
        page, _, anchor = notes["runbook"].partition("#")
        assert page == "docs/reliability.md" and anchor in anchors(PAGE), rule["alert"]
        for label in re.findall(r"\$labels\.(\w+)", notes["summary"]):
            assert re.search(rf"\b(by|on) \([^)]*\b{label}\b", rule["expr"]), (rule["alert"], label)


def test_every_fault_has_an_alert_or_a_written_reason_to_have_none() -> None:
    table = PAGE.partition("## The fault matrix")[2].partition("\n## ")[0]
    faults_of_page = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)}
    alerted = {row for alert in ALERTS for row in alert.rows}
    assert alerted | NOT_ALERTED.keys() == faults_of_page
    assert not alerted & NOT_ALERTED.keys()


def test_prometheus_accepts_the_rules_and_the_configuration() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", RULES.name, cwd=RULES.parent)
    promtool("check", "config", "prometheus.yaml", cwd=RULES.parent)


def check_after_20_min(folder: Path, series: Mapping[str, str], expression: str, wanted: float) -> None:
    """Check the value of an expression after 20 minutes of these series."""
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": wanted}]}
        ],
    }
    content = {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [case]}
    (folder / "test.yaml").write_text(json.dumps(content))
    promtool("test", "rules", "test.yaml", cwd=folder)


@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_alert_fires_on_its_fault(alert: str, tmp_path: Path) -> None:
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    check_after_20_min(tmp_path, {**HEALTHY, **FIRES[alert]}, firing, 1.0)


def test_nothing_fires_while_all_is_well(tmp_path: Path) -> None:
    check_after_20_min(tmp_path, HEALTHY, "count(ALERTS) or vector(0)", 0.0)
