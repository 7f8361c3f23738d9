"""Paths of the repository that this command was installed from, or next to a wheel's packages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files that a run leaves behind for a person to look at; not under version control, and not among a wheel's packages.
RUNTIME = ROOT / "runtime" if (ROOT / "pyproject.toml").is_file() else Path.home() / ".cache" / "baton"
