"""Prints the dependencies that a pyproject.toml names, without torch and our own: `requirements.py pyproject.toml`.

The images install torch by itself, in the build for their device, and the router not at all.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
sys.stdout.write("".join(f"{line}\n" for line in project["dependencies"] if not line.startswith(("torch", "baton-"))))
