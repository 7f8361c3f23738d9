"""Destination of a run's spans: its trace file, or a collector, whose address the file then contains."""

import json
from pathlib import Path

from baton.launch import CommandFailed
from baton.launch.log_files import newest_first
from baton.process.config import TelemetryConfig, read_config
from baton.process.private_files import private_folder, write_private
from baton.process.telemetry.collector import Collector

PATTERN = "traces-*.jsonl"
KEPT = 5


def chosen_collector(trace_file: Path | None = None) -> Collector | None:
    """Return the collector that gets traces instead of a file. Raises: ConfigError, CommandFailed."""
    collector = read_config(TelemetryConfig, ()).collector
    if collector is not None and trace_file is not None:
        raise CommandFailed(f"--trace-file: traces go to OTEL_EXPORTER_OTLP_ENDPOINT ({collector}); unset one of them")
    return collector


def begin_trace_file(folder: Path, port: int, collector: Collector | None = None) -> Path:
    """Create the trace file of a new run. Of the files of other runs, keep only the newest KEPT.

    With a `collector`, the file contains only its address.
    """
    path = private_folder(folder) / f"traces-{port}.jsonl"
    write_private(path, "" if collector is None else json.dumps({"sent_to": str(collector)}) + "\n")
    for old in newest_first(folder.glob(PATTERN))[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def collector_of(path: Path) -> str | None:
    """Return the collector whose address a trace file contains; None if the file has spans. Raises: OSError."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = next(lines, "")
    return json.loads(first)["sent_to"] if first.startswith('{"sent_to":') else None
