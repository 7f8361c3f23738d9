"""Folders of the repository from which this command was installed, or of a wheel's packages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Logs, traces and records of runs: outside version control, and outside a wheel's packages.
RUNTIME = ROOT / "runtime" if (ROOT / "pyproject.toml").is_file() else Path.home() / ".cache" / "baton"
