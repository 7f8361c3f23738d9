"""Each client in a virtual environment of its own, from `requirements/NAME.txt`."""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


def program(folder: Path, name: str, command: str) -> Path:
    """Path of a command of the client's; its environment in `folder` is made where there is none.

    Raises: CalledProcessError.
    """
    environment = folder / name
    marker = environment / "installed"
    if not marker.exists():
        print(f"installing {name} into {environment}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", str(REQUIREMENTS / f"{name}.txt")], check=True)
        marker.touch()
    return environment / "bin" / command
