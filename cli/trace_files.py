"""The trace files of `baton up`: one per run, named by its port; a few old ones are kept."""

from pathlib import Path

PATTERN = "traces-*.jsonl"
KEPT = 5


def begin_trace_file(folder: Path, port: int) -> Path:
    """The file for a new run, which begins empty; all but the newest few of other runs are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"traces-{port}.jsonl"
    path.write_bytes(b"")
    for old in _newest_first(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def newest_trace_file(folder: Path) -> Path | None:
    """The file that was written to last; None before the first run."""
    files = _newest_first(folder)
    return files[0] if files else None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN), key=lambda path: path.stat().st_mtime_ns, reverse=True)
