"""Print the dependencies of a pyproject.toml: `requirements.py pyproject.toml [EXTRAS]`.

Torch and the packages of this repository are left out: images install torch separately, in the build for their device.
With EXTRAS, separated by commas, only the dependencies of these extras are printed.
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
