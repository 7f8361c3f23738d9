"""The newest requests, from a router or from a file of spans: a table of them, or the waterfall of one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from baton.cli.layout import UNKNOWN, Column, fitting_table, ms, table
from baton.cli.span_files.places import collector_of
from baton.cli.span_files.read import StoredSpan, read_spans
from baton.cli.why.waterfall import path_of
from baton.client import RecentRequest, RequestDrafts, RequestStages, RequestStall, StallCausePart, TokenTimes
from baton.launch import CommandFailed

ID_CHARACTERS = 12


def _short_id(request: RecentRequest) -> str:
    given = request.request_id.removeprefix("req-") or UNKNOWN
    return given if len(given) <= ID_CHARACTERS else given[: ID_CHARACTERS - 1] + "~"


def _stalls(request: RecentRequest) -> str:
    """Format the number of stalls; UNKNOWN for a running request, since the router does not list its number."""
    return str(request.stall_count) if request.tbt is not None and request.phase != "decode" else UNKNOWN


def _longest_stall(request: RecentRequest) -> str:
    stall = max(request.stalls, key=lambda each: each.gap_ms, default=None)
    if stall is None:
        return UNKNOWN
    cause = f": {stall.causes[0].cause.replace('_', ' ')}" if stall.causes else ""
    return ms(stall.gap_ms) + cause


def _tbt(quantile: str) -> Callable[[RecentRequest], str]:
    return lambda request: ms(getattr(request.tbt, quantile)) if request.tbt is not None else UNKNOWN


COLUMNS: tuple[Column[RecentRequest], ...] = (
    Column("request", _short_id, is_number=False),
    Column("phase", lambda request: request.phase, is_number=False),
    Column("prompt", lambda request: str(request.prompt_tokens), rank=1),
    Column("out", lambda request: str(request.generated_tokens), rank=1),
    Column("TTFT", lambda request: ms(request.stages.ttft_ms) if request.stages.ttft_ms else UNKNOWN, rank=1),
    Column("TBT p50", _tbt("p50_ms"), rank=3),
    Column("TBT p99", _tbt("p99_ms"), rank=1),
    Column("total", lambda request: ms(request.stages.total_ms)),
    Column("stalls", _stalls, rank=1),
    Column("longest stall", _longest_stall, rank=2, is_number=False),
    Column("workers", path_of, rank=3, is_number=False),
)
_FULL_ID = replace(
    COLUMNS[0], cell=lambda request: request.request_id.removeprefix("req-") or request.trace_id[:ID_CHARACTERS]
)


def recent_lines(requests: Sequence[RecentRequest], width: int) -> list[str]:
    """Return a table of requests, with ids that `baton why` accepts."""
    columns = (_FULL_ID, *COLUMNS[1:])
    lines = fitting_table(columns, requests, width)
    return lines or table([column for column in columns if column.rank == 0], requests)


def requests_in_file(path: Path) -> list[RecentRequest]:
    """Return the requests of a trace file or of a collector's file of OTLP JSON, the newest first.

    Raises: CommandFailed.
    """
    try:
        if (collector := collector_of(path)) is not None:
            raise CommandFailed(
                f"{path}: the traces of this run went to the collector at {collector}; there a request's id is "
                "gen_ai.response.id of service `router`"
            )
        with path.open(encoding="utf-8", errors="replace") as lines:
            spans = read_spans(lines)
    except OSError as error:
        raise CommandFailed(
            f"{path}: {error.strerror}; `baton up` writes traces to runtime/traces-PORT.jsonl"
        ) from error
    requests = requests_in(spans)
    if not requests and spans:
        raise CommandFailed(f"{path} has {len(spans)} spans, and none is the root of a completed request")
    if not requests and path.stat().st_size:
        raise CommandFailed(f"{path} has no spans: its lines are neither those of `baton up` nor OTLP JSON")
    if not requests:
        raise CommandFailed(f"{path} has no completed request yet; try again in some seconds")
    return requests


def requests_in(spans: Iterable[StoredSpan]) -> list[RecentRequest]:
    """Return the requests whose roots are among the spans, the newest first."""
    spans = list(spans)
    children: dict[tuple[str, str | None], list[StoredSpan]] = {}
    for span in spans:
        children.setdefault((span.trace_id, span.parent_span_id), []).append(span)
    roots = [span for span in spans if span.kind == "server" and "baton.total_ms" in span.attributes]
    newest_ns = max((root.end_ns for root in roots), default=0)
    roots.sort(key=lambda root: -root.start_ns)
    return [_request(root, children.get((root.trace_id, root.span_id), ()), newest_ns) for root in roots]


def _request(root: StoredSpan, children: Sequence[StoredSpan], newest_ns: int) -> RecentRequest:
    given = root.attributes

    def number(name: str) -> Any:
        return given.get(name, 0)

    route = next((span.attributes for span in children if span.name == "route.select"), {})
    stalls = [_stall(event, root) for span in children for event in span.events if event["name"] == "stall"]
    tbt = [given.get(f"baton.tbt_{name}_ms") for name in ("p50", "p99", "max")]
    drafts = [number(f"baton.{name}") for name in ("drafted_tokens", "accepted_tokens", "drafts_saved_ms")]
    return RecentRequest(
        request_id=given.get("gen_ai.response.id", ""),
        trace_id=root.trace_id,
        model=given.get("gen_ai.request.model", ""),
        phase=given.get("baton.outcome", "failed" if root.is_error else "answered"),
        reason=given.get("baton.reason", ""),
        prefill=route.get("baton.route.prefill", ""),
        decode=route.get("baton.route.decode", ""),
        attempts=number("baton.attempts"),
        prompt_tokens=number("gen_ai.usage.input_tokens"),
        cached_tokens=number("gen_ai.usage.cache_read.input_tokens"),
        generated_tokens=number("gen_ai.usage.output_tokens"),
        age_s=(newest_ns - root.start_ns) / 1e9,
        stages=RequestStages(**{each.name: float(number(f"baton.{each.name}")) for each in fields(RequestStages)}),
        tbt=None if None in tbt else TokenTimes(*(float(each or 0.0) for each in tbt)),
        stalls=tuple(stalls),
        stall_count=max(number("baton.stalls"), len(stalls)),
        drafts=RequestDrafts(*drafts) if "baton.drafted_tokens" in given else None,
    )


def _stall(event: Mapping[str, Any], root: StoredSpan) -> RequestStall:
    given = event["attributes"]
    columns = (given.get(f"baton.{name}", ()) for name in ("causes", "cause_ms", "culprits", "details"))
    return RequestStall(
        at_ms=(event["time_ns"] - root.start_ns) / 1e6,
        gap_ms=given["baton.gap_ms"],
        usual_ms=given.get("baton.usual_ms", 0.0),
        causes=tuple(StallCausePart(*part) for part in zip(*columns, strict=False)),
        choice=given.get("baton.choice", 0),
    )
