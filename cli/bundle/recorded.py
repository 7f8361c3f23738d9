"""What runs have left behind: their last traces, and the ends of their logs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.cli.bundle.archive import Missing, Piece
from baton.cli.bundle.log_lines import safe_lines, tail
from baton.cli.bundle.sources import Sources
from baton.cli.connection import admin_client
from baton.cli.span_files.places import collector_of, newest_trace_file
from baton.cli.span_files.read import read_objects
from baton.cli.timeline.chrome import chrome_trace
from baton.client import ModelNotFound
from baton.client.timelines import ProcessTimeline
from baton.launch import CommandFailed
from baton.launch.log_files import PATTERN, newest_first
from baton.process.private_files import older

LAST_SPANS = 2000
TRACE_BYTES = 16 << 20
"""Of the end of a trace file, in which the last spans are looked for."""
TIMELINE_MS, TIMELINE_CALL_S = 60_000, 15.0
LOG_BYTES = 512 << 10
"""Of each process."""

_TOKEN = re.compile(r"[\w.:/@+-]{1,160}")
_NAME = re.compile(r"[\w.:/@+-]{1,160}(?: [\w.:/@+-]{1,160})?")
_TEXTS = {
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.response.id",
    "gen_ai.response.finish_reasons",
    "gen_ai.output.type",
    "error.type",
    "server.address",
    "baton.outcome",
    "baton.reason",
    "baton.failed_attempts",
    "baton.attempt.prefill",
    "baton.attempt.decode",
    "baton.attempt.failure",
    "baton.attempt.failed_worker",
    "baton.fetch.transport",
    "baton.transfer.transport",
    "baton.causes",
    "baton.elastic_worker",
    "baton.request_id",
    "baton.transfer.source",
    "baton.culprits",
    "baton.route.prefill",
    "baton.route.decode",
    "baton.route.policy",
    "baton.route.reason",
}
"""Attributes whose texts are shown, one word each."""
_NUMBERS = ("baton.", "gen_ai.", "server.port")
"""Attributes whose numbers and switches are shown."""


def traces(sources: Sources) -> Iterator[Piece | Missing]:
    path = newest_trace_file(sources.runtime)
    if sources.run is not None and Path(sources.run.trace_file).is_file():
        path = Path(sources.run.trace_file)
    if path is None:
        yield Missing("no run of `baton up` has written any here")
        return
    if (collector := collector_of(path)) is not None:
        yield Missing(f"they went to the collector at {collector}; attach what it has of the requests in question")
        return
    spans = list(read_objects([f"{line}\n" for line in tail(path, TRACE_BYTES)]))[-LAST_SPANS:]
    if not spans:
        yield Missing("the trace file of the last run has no finished request")
        return
    yield Piece(
        "traces.json",
        f"the last {len(spans)} spans, in the form of a trace file but as one list, texts of attributes left out",
        [safe_span(span) for span in spans],
    )


def timelines(sources: Sources) -> Iterator[Piece | Missing]:
    for number, target in enumerate(sources.admin_targets):
        try:
            with admin_client(target) as admin:
                found = admin.timelines(last_ms=TIMELINE_MS, timeout_s=TIMELINE_CALL_S)
        except (CommandFailed, ModelNotFound) as error:
            yield Missing(str(error))
            continue
        what = "what router and workers did in the last minute; https://ui.perfetto.dev opens it"
        yield Piece(f"timeline-{number}.json", what, chrome_trace([safe_timeline(each) for each in found]))


def safe_timeline(timeline: ProcessTimeline) -> ProcessTimeline:
    """Ids that are one word, as clients may choose any; no messages of failures, which may quote a request."""
    return replace(
        timeline,
        failure=timeline.failure.partition(":")[0],
        requests=tuple(
            replace(
                request,
                request_id=_word(request.request_id) or "",
                name=request.name if _NAME.fullmatch(request.name) else "",
                stalls=tuple(replace(stall, causes_ms=_safe_causes(stall.causes_ms)) for stall in request.stalls),
            )
            for request in timeline.requests
        ),
        worker_requests=tuple(
            replace(request, request_id=_word(request.request_id) or "", failure="failed" if request.failure else "")
            for request in timeline.worker_requests
        ),
    )


def _safe_causes(causes_ms: Mapping[str, float]) -> dict[str, float]:
    """Such as `prompt tokens by chat-7`."""
    named = ((*cause.partition(" by "), ms) for cause, ms in causes_ms.items())
    return {f"{cause}{by}{_word(culprit) or ''}": ms for cause, by, culprit, ms in named}


def safe_span(span: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trace_id": _word(span["trace_id"]),
        "span_id": _word(span["span_id"]),
        "parent_span_id": _word(span["parent_span_id"]),
        "name": span["name"] if _NAME.fullmatch(str(span["name"])) else None,
        "kind": _word(span["kind"]),
        "service": _word(span.get("service")),
        "start_ns": int(span["start_ns"]),
        "end_ns": int(span["end_ns"]),
        "status": _word(span["status"]),
        "status_message": _word(span.get("status_message")),
        "attributes": safe_attributes(span["attributes"]),
        "events": [
            {
                "name": _word(each.get("name")),
                "time_ns": each.get("time_ns") if isinstance(each.get("time_ns"), int) else None,
                "attributes": safe_attributes(each.get("attributes") or {}),
            }
            for each in span.get("events") or ()
        ],
    }


def safe_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of ours by their prefix, texts by their whole name."""
    return {name: value for name, value in attributes.items() if _is_safe(name, value)}


def _is_safe(name: str, value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_safe(name, each) for each in value)
    if isinstance(value, str):
        return name in _TEXTS and (not value or _TOKEN.fullmatch(value) is not None)
    return isinstance(value, bool | int | float) and name.startswith(_NUMBERS) and _TOKEN.fullmatch(name) is not None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and _TOKEN.fullmatch(value) else None


def logs(sources: Sources) -> Iterator[Piece | Missing]:
    """Of the last run's folder, each process in a file of its own."""
    folders = newest_first(sources.runtime.glob(PATTERN))
    if sources.run is not None and Path(sources.run.log_folder).is_dir():
        folders = [Path(sources.run.log_folder)]
    files = sorted(folders[0].glob("*.log")) if folders else []
    if not files:
        yield Missing("no run of `baton up` has written any here; containers keep theirs: docker compose logs")
    for path in files:
        try:
            lines = last_lines(path)
        except OSError as error:
            yield Missing(f"{path.name}: {error.strerror}")
            continue
        what = "the end of its log: lines of our own programs, without what they quote"
        yield Piece(f"logs/{path.name}", what, "".join(f"{line}\n" for line in safe_lines(lines)))


def last_lines(path: Path) -> Sequence[str]:
    """Of a log, with those of its older file before them. Raises: OSError."""
    lines = tail(path, LOG_BYTES)
    missing = LOG_BYTES - sum(map(len, lines))
    return [*(tail(older(path), missing) if missing > 0 and older(path).is_file() else []), *lines]
