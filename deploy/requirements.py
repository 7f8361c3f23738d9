"""Prints the dependencies that a pyproject.toml names: `requirements.py pyproject.toml [EXTRAS]`.

Torch and our own packages are left out: the images install torch by itself, in the build for their device, and the
router not at all. Of extras, a list with commas, it prints those alone.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
if extras := sys.argv[2:]:
    wanted = [line for extra in extras[0].split(",") for line in project["optional-dependencies"][extra]]
else:
    wanted = [line for line in project["dependencies"] if not line.startswith(("torch", "baton-"))]
sys.stdout.write("".join(f"{line}\n" for line in wanted))
