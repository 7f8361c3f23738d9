"""What the images are made of: read from Dockerfile, .dockerignore and the sources, since nothing here builds them."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from baton.cli.installed import REVISION_FILE

ROOT = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"kernels"}
ON_DEMAND = {"cli"}
"""Packages whose commands import their modules only when called."""


CONFIGURED = {"router": {"worker", "prefill_worker", "decode_worker", "elastic_worker"}, "worker": set[str]()}
"""Packages of which an image has the configuration alone, for the command line."""


def copied() -> dict[str, set[str]]:
    """By stage of the Dockerfile, what is copied into it and into those before that it is made from."""
    stages: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        match line.split():
            case ["FROM", source, "AS", name]:
                current = stages[name] = set(stages.get(source, ()))
            case ["COPY", *sources, _]:
                current |= {source.partition("/")[0] for source in sources}
    return stages


def imports_at_once(package: str) -> set[str]:
    """Packages of ours that its modules import when they are imported themselves."""
    found = set[str]()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "baton":
                found |= {f"baton.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return {name.split(".")[1] for name in found if name.startswith("baton.")} & PACKAGES


def test_dockerfile_copies_only_files_in_the_build_context() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set.union(*copied().values()) == let_through


@pytest.mark.parametrize("image", ["router", "worker"])
def test_image_contains_imported_packages(image: str) -> None:
    packages = copied()[image] & PACKAGES
    wanted = set[str]().union(*(imports_at_once(package) for package in packages - ON_DEMAND - CONFIGURED[image]))
    assert "protos" in wanted and "src" in copied()[image]
    assert wanted <= packages


@pytest.mark.parametrize("image", ["router", "worker"])
def test_image_labels_name_version_commit_source_licence(image: str) -> None:
    """Labels of Open Containers, of values that the build is given; and the commit in a file, for `baton version`."""
    stage = (ROOT / "Dockerfile").read_text().partition(f" AS {image}\n")[2].partition("\nFROM ")[0]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', stage))
    assert labels["title"] == f"baton-{image}" and labels["description"]
    assert (labels["version"], labels["revision"], labels["source"]) == ("$VERSION", "$REVISION", "$SOURCE")
    assert {f"ARG {name}" for name in ("VERSION", "REVISION", "SOURCE")} <= set(stage.splitlines())
    assert labels["licenses"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert f'RUN echo "$REVISION" > {REVISION_FILE}' in stage
