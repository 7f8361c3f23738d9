"""The list of what Baton is made of: valid, complete, with licences, and without test tools."""

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from tests.fixtures.tools import ROOT, load_script

MAKE_S = 400  # the first time, the generator is installed
SCHEMA = "bom-1.6.SNAPSHOT.schema.json"


def script() -> ModuleType:
    return load_script(ROOT / "deploy" / "sbom.py")


@pytest.fixture(scope="module")
def sbom(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the environment that runs the tests."""
    path = tmp_path_factory.mktemp("sbom") / "sbom.json"
    command = [sys.executable, str(ROOT / "deploy" / "sbom.py"), "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nit needs the package index once"
    return json.loads(path.read_text())


def names(sbom: Any) -> set[str]:
    return {script().normal(each["name"]) for each in sbom["components"]}


def test_sbom_is_valid_cyclonedx(sbom: Any) -> None:
    folder = next((ROOT / ".cache" / "sbom-tools").glob("lib/python*/site-packages/cyclonedx/schema/_res"))
    parts = {path.name: json.loads(path.read_text()) for path in folder.glob("*.SNAPSHOT.schema.json")}
    known = [(f"http://cyclonedx.org/schema/{name}", Resource.from_contents(part)) for name, part in parts.items()]
    faults = Draft7Validator(parts[SCHEMA], registry=Registry().with_resources(known)).iter_errors(sbom)
    assert [f"{fault.json_path}: {fault.message}" for fault in faults] == []


def test_sbom_has_direct_dependencies_and_no_test_tool(sbom: Any) -> None:
    assert script().direct_dependencies() <= names(sbom)
    assert not {"pytest", "mypy", "ruff", "hypothesis", "podman-compose"} & names(sbom)


def test_sbom_components_have_version_and_licence(sbom: Any) -> None:
    assert [each["name"] for each in sbom["components"] if not (each.get("version") and each.get("licenses"))] == []


def test_sbom_names_the_project_and_its_licence(sbom: Any) -> None:
    subject = sbom["metadata"]["component"]
    assert (subject["name"], subject["licenses"][0]["license"]["id"]) == ("baton-serve", "Apache-2.0")


def component(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "bom-ref": f"{name}==1", "version": "1", "licenses": [{"license": {"id": "MIT"}}], **fields}


BOM = {
    "metadata": {"component": {"bom-ref": "root"}},
    "components": [*map(component, ("torch", "sympy", "numpy", "pytest")), component("protobuf", licenses=[])],
}
NEEDS = {"torch": ["sympy", "numpy"], "sympy": [], "numpy": [], "protobuf": ["absent"], "pytest": []}


def test_sbom_without_package_leaves_out_its_dependencies() -> None:
    made = script().needed_at_run_time(BOM, {"torch", "numpy", "protobuf"}, NEEDS, {"torch"})
    assert names(made) == {"numpy", "protobuf"}
    assert made["dependencies"][0] == {"ref": "root", "dependsOn": ["numpy==1", "protobuf==1"]}
    assert made["components"][1]["licenses"][0]["license"]["id"] == "BSD-3-Clause"


def test_sbom_missing_dependency_is_named() -> None:
    with pytest.raises(SystemExit, match="not installed in that environment: redis"):
        script().needed_at_run_time(BOM, {"numpy", "redis"}, NEEDS, ())
