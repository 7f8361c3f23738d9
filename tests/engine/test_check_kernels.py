"""The folder `kernels` and the package of that name on PyPI."""

import subprocess
import sys
from pathlib import Path

from engine.check_kernels import require_own_kernels

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from engine.check_kernels import require_own_kernels; require_own_kernels()"


def test_our_own_folder_is_accepted() -> None:
    require_own_kernels()


def test_a_foreign_package_is_named_with_what_to_uninstall(tmp_path: Path) -> None:
    """It wins wherever it stands on the path, since our folder has no __init__.py."""
    planted = tmp_path / "kernels"
    planted.mkdir()
    (planted / "__init__.py").touch()
    for path in ([ROOT, tmp_path], [tmp_path, ROOT]):
        program = f"import sys; sys.path[:0] = {[str(entry) for entry in path]}; {PROGRAM}"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert "ForeignKernelsError" in done.stderr
        assert "pip uninstall kernels" in done.stderr
        assert str(planted) in done.stderr
