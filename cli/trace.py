"""`baton trace`: prints where the time of the last requests went."""

import json
from pathlib import Path

from cli.errors import CommandFailed
from cli.paths import RUNTIME
from cli.trace_files import collector_of, newest_trace_file
from cli.trace_report import as_object, read_spans, report_lines, requests_in


def show_traces(file: str | None, last: int, as_json: bool) -> int:
    """Raises CommandFailed where there is no trace to show."""
    path = Path(file) if file is not None else newest_trace_file(RUNTIME)
    if path is None:
        raise CommandFailed("no traces yet: `baton up` writes them")
    try:
        if (collector := collector_of(path)) is not None:
            raise CommandFailed(
                f"the traces of the last `baton up` go to {collector} (OTEL_EXPORTER_OTLP_ENDPOINT) and to no file"
            )
        with path.open(encoding="utf-8", errors="replace") as lines:
            requests = requests_in(read_spans(lines))[-last:]
    except OSError as error:
        raise CommandFailed(f"no traces in {path}: {error.strerror}; `baton up` writes them there") from error
    if not requests:
        raise CommandFailed(f"no finished request in {path} yet; they are written within some seconds")
    for number, request in enumerate(requests):
        if as_json:
            print(json.dumps(as_object(request)))
        else:
            print(*([""] if number else []), *report_lines(request), sep="\n")
    return 0
