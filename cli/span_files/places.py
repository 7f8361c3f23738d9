"""Where the spans of a run go: to a file of its own, or to a collector, which that file then names."""

import json
from pathlib import Path

from baton.launch import CommandFailed
from baton.process.config import ConfigError, TelemetryConfig, read_config
from baton.process.private_files import private_folder, write_private
from baton.process.telemetry.collector import Collector

PATTERN = "traces-*.jsonl"
KEPT = 5


def chosen_collector(trace_file: Path | None = None) -> Collector | None:
    """Where the router sends traces instead of to a file. Raises CommandFailed."""
    try:
        collector = read_config(TelemetryConfig, ()).collector
    except ConfigError as error:
        raise CommandFailed(str(error)) from error
    if collector is not None and trace_file is not None:
        raise CommandFailed(f"traces go to OTEL_EXPORTER_OTLP_ENDPOINT ({collector}) or to --trace-file, not to both")
    return collector


def begin_trace_file(folder: Path, port: int, collector: Collector | None = None) -> Path:
    """The file for a new run, which begins without spans; all but the newest few of other runs are removed.

    Where the traces of the run go to a `collector`, the file contains only that fact.
    """
    path = private_folder(folder) / f"traces-{port}.jsonl"
    write_private(path, "" if collector is None else json.dumps({"sent_to": str(collector)}) + "\n")
    for old in _newest_first(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def newest_trace_file(folder: Path) -> Path | None:
    """The file that was written to last; None before the first run."""
    files = _newest_first(folder)
    return files[0] if files else None


def collector_of(path: Path) -> str | None:
    """Where the traces of that run go instead; None: into the file. Raises: OSError."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = next(lines, "")
    return json.loads(first)["sent_to"] if first.startswith('{"sent_to":') else None


def sent_elsewhere(collector: str) -> str:
    """How traces are found that went to a collector, for a message."""
    return (
        f"go to the collector at {collector}, and to no file. There a trace is found by its id (the answer's request "
        "id is its attribute gen_ai.response.id) or by the service `router`. A file that the collector has written "
        "as OTLP JSON is read by `baton trace --file FILE`; without OTEL_EXPORTER_OTLP_ENDPOINT, `baton up` writes a "
        "file itself"
    )


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN), key=lambda path: path.stat().st_mtime_ns, reverse=True)
