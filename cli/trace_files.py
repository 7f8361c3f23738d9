"""The trace files of `baton up`: one per run, named by its port; a few old ones are kept.

Where the traces of a run go to a collector, its file contains only that fact.
"""

import json
from pathlib import Path

from cli.errors import CommandFailed
from service.config import ConfigError, TelemetryConfig, read_config

PATTERN = "traces-*.jsonl"
KEPT = 5


def chosen_collector(trace_file: Path | None) -> str | None:
    """Where the router sends traces instead of to a file. Raises CommandFailed."""
    try:
        collector = read_config(TelemetryConfig, ()).otlp_endpoint
    except ConfigError as error:
        raise CommandFailed(str(error)) from error
    if collector is not None and trace_file is not None:
        raise CommandFailed(f"traces go to OTEL_EXPORTER_OTLP_ENDPOINT ({collector}) or to --trace-file, not to both")
    return collector


def begin_trace_file(folder: Path, port: int, collector: str | None = None) -> Path:
    """The file for a new run, which begins without spans; all but the newest few of other runs are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"traces-{port}.jsonl"
    path.write_text("" if collector is None else json.dumps({"sent_to": collector}) + "\n", encoding="utf-8")
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


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN), key=lambda path: path.stat().st_mtime_ns, reverse=True)
