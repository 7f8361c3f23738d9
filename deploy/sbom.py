"""Write a CycloneDX SBOM of an environment with Baton: `.venv/bin/python deploy/sbom.py`.

    --python PYTHON     interpreter of the environment; default: the one that runs this
    --without PACKAGES  names separated by commas, left out with what only they need: `torch` for a router's image
    --output FILE       default: sbom.json
    --check             also validate all formats of the result (10 s)

It lists the run-time dependencies of pyproject.toml and theirs, without test tools. The generator, cyclonedx-bom, is
installed into `.cache/sbom-tools` at the first use.
"""

import argparse
import fcntl
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS_FOLDER = ROOT / ".cache" / "sbom-tools"
PINS = Path(__file__).with_name("sbom-requirements.txt")
INSTALL_S, GENERATE_S = 300, 120
LICENSES = {"protobuf": "BSD-3-Clause", "transformers": "Apache-2.0"}
"""Licences of packages whose metadata states them in a form that the generator does not read."""
_REQUIRED = """
import importlib.metadata, json
print(json.dumps({each.metadata["Name"]: each.requires or [] for each in importlib.metadata.distributions()}))
"""
_CHECK = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
sys.exit(f"not valid: {fault}" if fault else 0)
"""


def tools_python() -> Path:
    """Return the interpreter of the generator's environment; one process at a time creates it."""
    python, stamp = TOOLS_FOLDER / "bin" / "python", TOOLS_FOLDER / "installed.txt"
    wanted = PINS.read_text() + sys.version
    TOOLS_FOLDER.parent.mkdir(exist_ok=True)
    with TOOLS_FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            shutil.rmtree(TOOLS_FOLDER, ignore_errors=True)
            environment = [sys.executable, "-m", "venv", "--without-pip", str(TOOLS_FOLDER)]
            subprocess.run(environment, check=True, timeout=INSTALL_S)
            command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile", "--no-deps"]
            command += ["--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, "--requirement", str(PINS)], check=True, timeout=INSTALL_S)
            stamp.write_text(wanted)
    return python


def generate(python: str) -> dict[str, Any]:
    """Return the SBOM of all installed packages."""
    command = [str(tools_python()), "-m", "cyclonedx_py", "environment", "--no-validate", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application", python]
    done = subprocess.run(command, check=True, timeout=GENERATE_S, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def direct_dependencies() -> set[str]:
    """Return the normalised names in pyproject.toml, without the packages of this repository."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {name for name in map(name_in, lines) if not name.startswith("baton-")}


def requirements(python: str) -> dict[str, set[str]]:
    """Return the required packages of each installed package, without those of extras."""
    done = subprocess.run([python, "-c", _REQUIRED], check=True, timeout=GENERATE_S, capture_output=True, text=True)
    lines: dict[str, list[str]] = json.loads(done.stdout)
    return {normal(name): {name_in(line) for line in each if "extra ==" not in line} for name, each in lines.items()}


def name_in(requirement: str) -> str:
    return normal(re.split(r"[<>=!~;\[( ]", requirement)[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_at_run_time(
    bom: dict[str, Any], wanted: Collection[str], needs: Mapping[str, Collection[str]], without: Collection[str]
) -> dict[str, Any]:
    """Return the wanted components and their dependencies. Raises: SystemExit if one is not installed."""
    components = {normal(each["name"]): each for each in bom["components"]}
    direct = sorted(set(wanted) - set(without))
    if missing := [name for name in direct if name not in components]:
        raise SystemExit(f"not installed in that environment: {', '.join(missing)}")
    kept, waiting = dict[str, list[str]](), list(direct)
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = sorted(each for each in needs[name] if each in components and each not in without)
            waiting += kept[name]

    def edges(ref: str, names: Iterable[str]) -> dict[str, Any]:
        return {"ref": ref, "dependsOn": [components[each]["bom-ref"] for each in names]}

    dependencies = [edges(components[name]["bom-ref"], kept[name]) for name in sorted(kept)]
    root = edges(bom["metadata"]["component"]["bom-ref"], direct)
    return {
        **bom,
        "components": [with_license(components[name]) for name in sorted(kept)],
        "dependencies": [root, *dependencies],
    }


def with_license(component: dict[str, Any]) -> dict[str, Any]:
    known = LICENSES.get(normal(component["name"]))
    if component.get("licenses") or known is None:
        return component
    return {**component, "licenses": [{"license": {"id": known, "acknowledgement": "declared"}}]}


def check(path: Path) -> None:
    subprocess.run([str(tools_python()), "-c", _CHECK, str(path)], check=True, timeout=GENERATE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--without", default="")
    parser.add_argument("--output", type=Path, default=Path("sbom.json"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    without = {normal(name) for name in given.without.split(",") if name}
    needs = requirements(given.python)
    found = needed_at_run_time(generate(given.python), direct_dependencies(), needs, without)
    given.output.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    if given.check:
        check(given.output)
    sys.stdout.write(f"{given.output}: {len(found['components'])} components\n")


if __name__ == "__main__":
    main()
