"""Where things lie in the repository that this command was installed from."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files that a run leaves behind for a person to look at; not under version control.
RUNTIME = ROOT / "runtime"
