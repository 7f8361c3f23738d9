"""Choice of the trace exporter of a process."""

import logging
from pathlib import Path

from baton.process.telemetry.collector import Collector
from baton.process.telemetry.spans import NoTelemetry, Telemetry

logger = logging.getLogger(__name__)


def open_telemetry(service_name: str, collector: Collector | None, trace_file: Path | None) -> Telemetry:
    """Return an exporter to `collector`. Without collector: to `trace_file`. Without both: one that records nothing."""
    if collector is None and trace_file is None:
        return NoTelemetry()
    try:
        from baton.process.telemetry.otel import file_telemetry, otlp_telemetry

        if collector is not None:
            return otlp_telemetry(service_name, collector)
    except ImportError as error:
        logger.warning("traces are not recorded: %s", error)
        return NoTelemetry()
    return file_telemetry(service_name, trace_file) if trace_file is not None else NoTelemetry()
