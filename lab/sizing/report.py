"""The candidates as a table and as JSON. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from baton.lab.commands.size_options import SizeOptions
from baton.lab.report.result import Columns, table
from baton.lab.sizing.search import Interval, SearchResult, SizingCandidate

FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "tbt_p50_ms", "tbt_p99_ms", "share")


def summary(candidate: SizingCandidate) -> str:
    """Return the line that is printed when a candidate has been simulated."""
    refused = sum(run.failed for run in candidate.runs)
    note = f"; {refused} refused or failed" if refused else ""
    return f"{candidate.workers}: {_share(candidate.of('share'))} in SLO{note}"


def as_text(options: SizeOptions, curves: Mapping[str, Any], found: SearchResult) -> str:
    columns: Columns[SizingCandidate] = {
        "workers": lambda each: f"{each.workers}{'  <-' if each is found.taken else ''}",
        "TTFT p50 ms": lambda each: _ms(each.of("ttft_p50_ms")),
        "p99": lambda each: _ms(each.of("ttft_p99_ms")),
        "TBT p50 ms": lambda each: _ms(each.of("tbt_p50_ms")),
        "p99 ": lambda each: _ms(each.of("tbt_p99_ms")),
        "in SLO": lambda each: _share(each.of("share")),
        "of TTFT": lambda each: f"{each.of('ttft_share').middle:.1%}",
        "of TBT": lambda each: f"{each.of('tbt_share').middle:.1%}",
    }
    return "\n".join((table(found.tried, columns), "", *_notes(options, curves, found)))


def _notes(options: SizeOptions, curves: Mapping[str, Any], found: SearchResult) -> list[str]:
    goal = f"TTFT {options.ttft_slo_ms:g} ms and TBT {options.tbt_slo_ms:g} ms for {options.share:.0%} of requests"
    if found.taken is None:
        verdict = (
            f"no cluster meets {goal}: the limit of {options.most_workers} workers was reached, or more did not help"
        )
    else:
        verdict = f"{found.taken.workers} is the cheapest that meets {goal}; with one worker fewer it is missed"
    machine = curves.get("machine", {})
    threads, dtype = curves.get("threads", "?"), curves.get("dtype", "?")
    device = f"{machine.get('cpu', 'an unnamed device')}, {threads} threads, {dtype}"
    return [
        verdict,
        f"median of {options.seeds} seeds and their range, each of {options.requests} requests",
        f"step costs: {curves.get('model', 'unknown model')} on {device}, {machine.get('date', 'no date')}",
    ]


def as_json(options: SizeOptions, curves: Mapping[str, Any], found: SearchResult) -> dict[str, Any]:
    taken = found.taken
    return {
        "taken": None if taken is None else taken.workers._asdict(),
        "targets": {"ttft_slo_ms": options.ttft_slo_ms, "tbt_slo_ms": options.tbt_slo_ms, "share": options.share},
        "seeds": options.seeds,
        "requests": options.requests,
        "interval": "median, lowest and highest of the seeds",
        "curves": {name: curves.get(name) for name in ("machine", "model", "threads", "dtype", "quantize")},
        "candidates": [
            {
                **each.workers._asdict(),
                "meets": each.meets(options.share),
                **{name: each.of(name)._asdict() for name in FIGURES},
                "runs": [asdict(run) for run in each.runs],
            }
            for each in found.tried
        ],
    }


def _ms(found: Interval) -> str:
    places = 1 if found.middle < 100 else 0
    return f"{found.middle:,.{places}f} ({found.low:,.{places}f}-{found.high:,.{places}f})"


def _share(found: Interval) -> str:
    return f"{found.middle:.1%} ({found.low:.1%}-{found.high:.1%})"
