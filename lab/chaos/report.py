"""Report of a run as JSON, Markdown and charts. Pure except `write`."""

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.lab.chaos.checker import FindingKind, Injected, StreamGap, gaps_at, pauses_by_kind
from baton.lab.chaos.faults import FaultKind
from baton.lab.chaos.history import StreamHistory
from baton.lab.chaos.run import ChaosOptions, ChaosOutcome, ChaosRun
from baton.lab.chaos.watch import BOUND_BYTES, BOUND_ROUTER_BYTES, LEAST_S, WARM_UP_S, Look
from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import SERVICE, judge_rounds, make_result, write_result
from baton.lab.report.statistics import percentile

PROMISE = "no token is lost, repeated, reordered or wrong, no stream hangs or fails, and every kind of fault is proven"
POINTS = 160  # number of points of a memory curve


def draw_gaps(gaps: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw the cumulative distribution of gaps over all streams. Raises: ValueError without a gap."""
    curves = []
    for name, seconds in gaps.items():
        shares = [(percentile(seconds, share), float(share)) for share in range(101)] if seconds else []
        curves.append(DrawnCurve(name, tuple(shares), is_dashed=True))
    return draw_lines(LineChart(title, Axis("seconds without a token"), Axis("% of streams"), tuple(curves)))


def draw_memory(looks: Sequence[Look], began_s: float, title: str) -> str:
    """Draw the resident memory of each process over time, restarts included. Raises: ValueError without a sample."""
    curves = []
    for name in sorted({look.name for look in looks}):
        own = [look for look in looks if look.name == name]
        step = max(1, len(own) // POINTS)
        points = tuple(((look.at_s - began_s) / 60, look.rss_bytes / 2**20) for look in own[::step])
        curves.append(DrawnCurve(name, points, is_dashed=True))
    return draw_lines(LineChart(title, Axis("minutes"), Axis("MiB resident"), tuple(curves)))


DEATHS = {
    "killed": frozenset({FaultKind.KILL}),
    "stopped (SIGSTOP)": frozenset({FaultKind.STOP}),
    "cut off or partitioned": frozenset({FaultKind.CUT, FaultKind.PARTITION, FaultKind.ONE_WAY}),
    "drained (SIGTERM)": frozenset({FaultKind.RESTART}),
    "on a host that was lost": frozenset({FaultKind.HOST_LOST}),
    "on a host whose link was cut": frozenset({FaultKind.LINK_CUT}),
    "on a host whose link was slow or lost packets": frozenset({FaultKind.LINK_SLOW, FaultKind.LINK_LOSSY}),
}
LISTED = 40
LISTS = {
    "crashes": "Unexpected exits of processes:",
    "not_recovered": "Faults without recovery in time:",
    "not_made": "Not made, because there was nothing to break at that time; not counted as faults:",
    "never_made": "Kinds that were tried and never made, so that nothing was tested:",
    "too_few_proven": "Kinds with fewer than half of their faults proven, or none, so that they tested too little:",
    "not_proven": "Not proven, with the reason; not counted as faults:",
}
"""Lists of a report that are shown if they have entries, with their headings."""
LONGEST = 12  # number of the longest gaps that a report lists


def run_chaos(options: ChaosOptions, folder: Path | None) -> bool:
    """Run chaos and print the report; return whether the outcome is good. `folder`: None for a new one, which is kept
    if the run fails.
    """
    kept = folder or Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    (kept / "logs").mkdir(parents=True, exist_ok=True)
    outcome = asyncio.run(ChaosRun(options, lambda line: print(line, flush=True)).run(kept / "logs"))
    write(outcome, kept)
    print(markdown(summary(outcome)))
    if folder is None and outcome.is_good:
        shutil.rmtree(kept)
    else:
        print(f"report, streams and logs: {kept}")
    return outcome.is_good


def summary(outcome: ChaosOutcome) -> dict[str, Any]:
    """Return all results of a run as a dict that can be written as JSON."""
    began_s = outcome.began_s
    streams = {each.number: _stream_text(each, began_s) for each in outcome.histories}
    findings = Counter(finding.kind for finding in (*outcome.findings, *outcome.after))
    return {
        "good": outcome.is_good,
        "seed": outcome.options.seed,
        "clients": outcome.options.clients,
        "seconds": round(outcome.ended_s - began_s, 1),
        "streams": len(outcome.histories),
        "streams_by_behaviour": Counter(each.behaviour.value for each in outcome.histories),
        "streams_by_kind": Counter(each.case.rpartition(" ")[0] for each in outcome.histories),
        "streams_of_several_attempts": sum(len(each.attempts) > 1 for each in outcome.histories),
        "tokens": sum(each.tokens for each in outcome.histories),
        "undisturbed_tokens": {
            kind: {"tokens": count, "close": outcome.close[kind]} for kind, count in sorted(outcome.chosen.items())
        },
        "speculate": outcome.options.speculate,
        "drafted_tokens": sum(each.drafted_tokens for each in outcome.histories),
        "accepted_tokens": sum(each.accepted_tokens for each in outcome.histories),
        "tier": dict(sorted(outcome.tier.items())) if outcome.options.tier else None,
        "tier_off": outcome.tier_off,
        "faults": len(outcome.injected) - len(outcome.unproven),
        "faults_by_kind": Counter(each.fault.kind.value for each in outcome.injected if each.proof),
        "not_proven": [f"{each.fault}: {each.trouble}" for each in outcome.unproven],
        "too_few_proven": outcome.too_few_proven,
        "not_made": [f"{each.fault}: {each.why}" for each in outcome.unmade],
        "never_made": outcome.never_made,
        "not_recovered": [f"{each.fault}: {each.trouble}" for each in outcome.late]
        + [outcome.missing] * bool(outcome.missing),
        "findings": {kind.value: findings[kind] for kind in FindingKind},
        "statuses": Counter((each.failure or "OK").partition(":")[0].strip() for each in outcome.histories),
        **_gap_figures(outcome),
        "pauses_s": {
            kind.value: _percentiles(seconds)
            for kind, seconds in pauses_by_kind(outcome.injected, outcome.histories).items()
        },
        "pages_free_after_s": outcome.pages_free_after_s,
        "pages_held_by": outcome.held,
        "left_in_shared_memory": outcome.left_in_shared_memory,
        "left_processes": outcome.left_processes,
        "crashes": outcome.crashes,
        "harness_lag_s": round(outcome.harness_lag_s, 3),
        "memory_flat": outcome.is_flat,
        "processes": [
            {**asdict(each), "per_minute_bytes": round(each.per_minute), "flat": each.is_flat}
            for each in outcome.growth
        ],
        "injected": [_injected(each, began_s) for each in outcome.injected],
        "broken": [
            {**asdict(finding), **(streams[finding.stream] if finding in outcome.findings else {})}
            for finding in outcome.faults
        ],
    }


def _injected(fault: Injected, began_s: float) -> dict[str, Any]:
    return {
        "what": str(fault.fault),
        "at_s": round(fault.at_s - began_s, 3),
        "healed_s": round(fault.healed_s - began_s, 3),
        "proof": fault.proof,
        "trouble": fault.trouble,
    }


def write(outcome: ChaosOutcome, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = summary(outcome)
    write_result(
        folder / "report.json", make_result(SERVICE, [facts], judge_rounds(PROMISE, [outcome.is_good], "runs"))
    )
    lines = (json.dumps(_stream_text(each, outcome.began_s)) for each in outcome.histories)
    (folder / "streams.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "report.md").write_text(markdown(facts))
    gaps = {name: [gap.seconds for gap in each] for name, each in _gaps(outcome).items() if each}
    if gaps:
        (folder / "gaps.svg").write_text(draw_gaps(gaps, "The pause that a client sees when its decode worker is …"))
    if outcome.looks:
        (folder / "memory.svg").write_text(draw_memory(outcome.looks, outcome.began_s, "Memory of each process"))


def markdown(facts: dict[str, Any]) -> str:
    """Return the report as Markdown. `facts`: return value of `summary`."""
    findings, verdict = facts["findings"], "good" if facts["good"] else "NOT good"
    wrong = sum(findings[kind.value] for kind in FindingKind if kind.value.startswith("wrong"))
    lines = [
        f"# Chaos, seed {facts['seed']}: {verdict}",
        "",
        f"{facts['streams']} streams ({facts['tokens']} tokens) of {facts['clients']} clients over {facts['faults']} "
        f"proven faults ({len(facts['not_proven'])} more were not proven) in {facts['seconds'] / 60:.1f} minutes; "
        f"{facts['streams_of_several_attempts']} streams took more than one attempt.",
        *_chosen(facts),
        *_drafted(facts),
        *_in_files(facts),
        "",
        "| lost | repeated | reordered | wrong | hanging | failed | close, counted apart |",
        "|---|---|---|---|---|---|---|",
        f"| {findings['lost']} | {findings['repeated']} | {findings['reordered']} | {wrong} | {findings['hang']} "
        f"| {findings['failed']} | {findings['close']} |",
        "",
        f"All blocks free after {_seconds_text(facts['pages_free_after_s'])}; left in /dev/shm: "
        f"{len(facts['left_in_shared_memory'])}, processes: {len(facts['left_processes'])}. "
        f"The harness itself was late by {facts['harness_lag_s']:.2f} s at most; all pauses below include that.",
        "",
        *_gap_table(facts),
    ]
    lines += ["", "![Gaps](gaps.svg)", "", "![Memory](memory.svg)", ""]
    lines += ["| fault | times | streams open | their pause, p50 | p99 | longest |", "|---|---|---|---|---|---|"]
    for kind, count in sorted(facts["faults_by_kind"].items()):
        pauses = facts["pauses_s"].get(kind)
        cells = [f"{pauses[name]:.2f} s" for name in ("p50", "p99", "max")] if pauses else ["", "", ""]
        lines.append(f"| {kind} | {count} | {pauses['streams'] if pauses else 0} | {' | '.join(cells)} |")
    lines += ["", *_longest_gaps(facts)]
    lines += ["", _memory(facts), ""]
    lines += ["| process | life | RSS at its end | growth | per minute | descriptors | threads | flat |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for each in facts["processes"]:
        (first, last), (before, after) = each["descriptors"], each["threads"]
        lines.append(
            f"| {each['name']} ({each['pid']}) | {each['seconds']:.0f} s | {each['rss_bytes'] / 2**20:.0f} MiB "
            f"| {(each['private_bytes'][1] - each['private_bytes'][0]) / 2**20:+.1f} MiB "
            f"| {each['per_minute_bytes'] / 2**10:+.0f} KiB | {first} → {last} | {before} → {after} "
            f"| {'yes' if each['flat'] else 'NO'} |"
        )
    for name, heading in LISTS.items():
        if facts[name]:
            lines += ["", heading, "", *(f"- {each}" for each in facts[name])]
    if facts["broken"]:
        lines += [
            "",
            "| stream | what | choice | offset | | case, from and to, attempts |",
            "|---|---|---|---|---|---|",
        ]
        for each in facts["broken"][:LISTED]:
            detail = each["detail"].replace("|", "/")
            row = (each["stream"], each["kind"], each["choice"], each["offset"], detail, _course(each))
            lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"


def _course(broken: dict[str, Any]) -> str:
    """Describe a broken stream: its case, when it ran, and on which workers."""
    if "attempts" not in broken:
        return "after the faults, undisturbed"
    attempts = [
        f"{each['prefill'] or 'no prefill'} > {each['decode']}{' ' if each['failure'] else ''}{each['failure']}"
        for each in broken["attempts"]
    ]
    return f"{broken['case']}, {broken['began_s']} to {broken['closed_s']} s, {'; '.join(attempts)}".replace("|", "/")


def _chosen(facts: dict[str, Any]) -> list[str]:
    kinds = [f"{each['tokens']} {kind} ({each['close']} close)" for kind, each in facts["undisturbed_tokens"].items()]
    return [f"Tokens of the undisturbed answers were judged: {', '.join(kinds)}."] if kinds else []


def _drafted(facts: dict[str, Any]) -> list[str]:
    if facts["speculate"] == "off":
        return []
    accepted = f"{facts['accepted_tokens']} of {facts['drafted_tokens']} drafted tokens were accepted"
    return [f"Workers had `--speculate {facts['speculate']}`: {accepted}, as reported by surviving routers."]


def _in_files(facts: dict[str, Any]) -> list[str]:
    found, off = Counter(facts["tier"] or ()), Counter(facts["tier_off"])
    if facts["tier"] is None:
        return []
    if not found["hits"]:
        return ["Workers kept KV in files, but NO block was read from files: they were not tested."]
    return [
        f"KV files: {found['hits']} of {found['queries']} prompt blocks that pools lacked were loaded from files; "
        f"{found['corrupt_blocks']} damaged blocks were detected and recomputed, {found['evicted_blocks']} evicted. "
        f"Workers turned reads off {off['reads']} times and writes {off['writes']} times, and on again. "
        f"{found['at_rest_checked_blocks']} cached blocks were compared before their use, of which "
        f"{found['at_rest_corrupt_blocks']} had changed."
    ]


def _stream_text(history: StreamHistory, began_s: float) -> dict[str, Any]:
    """Return the fields of a report that show what happened to a stream."""
    times = [history.began_s, *history.token_times, history.closed_s or history.began_s]
    return {
        "stream": history.number,
        "case": history.case,
        "behaviour": history.behaviour,
        "request_id": history.request_id,
        "began_s": round(history.began_s - began_s, 3),
        "closed_s": round(history.closed_s - began_s, 3) if history.closed_s is not None else None,
        "failure": history.failure,
        "tokens": history.tokens,
        "longest_pause_s": round(max(after - before for before, after in pairwise(times)), 3),
        "attempts": [asdict(attempt) for attempt in history.attempts],
    }


def _gaps(outcome: ChaosOutcome) -> dict[str, list[StreamGap]]:
    return {name: gaps_at(outcome.injected, outcome.histories, kinds) for name, kinds in DEATHS.items()}


def _gap_figures(outcome: ChaosOutcome) -> dict[str, Any]:
    """Return percentiles of all gaps and of gaps during which no other fault happened, and the longest gaps."""
    gaps = _gaps(outcome)
    alone = {name: [gap.seconds for gap in each if not gap.meanwhile] for name, each in gaps.items()}
    longest = sorted((gap for each in gaps.values() for gap in each), key=lambda gap: -gap.seconds)[:LONGEST]
    return {
        "gaps_s": {name: _percentiles([gap.seconds for gap in each]) for name, each in gaps.items() if each},
        "gaps_alone_s": {name: _percentiles(seconds) for name, seconds in alone.items() if seconds},
        "longest_gaps": [
            {
                "stream": gap.stream,
                "what": str(outcome.injected[gap.fault].fault),
                "at_s": round(outcome.injected[gap.fault].at_s - outcome.began_s, 3),
                "seconds": round(gap.seconds, 3),
                "meanwhile": gap.meanwhile,
            }
            for gap in longest
        ],
    }


def _gap_table(facts: dict[str, Any]) -> list[str]:
    lines = [
        "| decode worker | streams | gap p50 | p99 | longest | no other fault meanwhile | p50 | p99 | longest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in facts["gaps_s"].items():
        lines.append(f"| {name} | {_cells(each)} | {_cells(facts['gaps_alone_s'].get(name))} |")
    return lines


def _longest_gaps(facts: dict[str, Any]) -> list[str]:
    lines = ["| longest gaps | at | seconds | other faults meanwhile |", "|---|---|---|---|"]
    for each in facts["longest_gaps"]:
        who = f"{each['what']}, stream {each['stream']}"
        lines.append(f"| {who} | {each['at_s']:.1f} s | {each['seconds']:.2f} | {', '.join(each['meanwhile'])} |")
    return lines


def _cells(gaps: dict[str, float] | None) -> str:
    """Return the table cells of some gaps: number of streams and percentiles."""
    if gaps is None:
        return "0 | | |"
    return f"{gaps['streams']} | {gaps['p50']:.2f} s | {gaps['p99']:.2f} s | {gaps['max']:.2f} s"


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "streams": len(seconds),
        "p50": percentile(seconds, 50),
        "p99": percentile(seconds, 99),
        "max": max(seconds),
    }


def _memory(facts: dict[str, Any]) -> str:
    verdict = "flat" if facts["memory_flat"] else "NOT flat"
    longest = max((each["seconds"] for each in facts["processes"]), default=0.0)
    return (
        f"Memory {verdict}: {len(facts['processes'])} processes lived for {LEAST_S:g} s or more (at most {longest:.0f} "
        f"s); each may grow by {BOUND_BYTES >> 20} MiB of private memory after {WARM_UP_S:g} s of warm-up, a router "
        f"by {BOUND_ROUTER_BYTES >> 20} MiB: bounded records and the allocator (lab/chaos/watch.py)."
    )


def _seconds_text(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
