"""Fixtures that more than one folder of tests uses."""

from pathlib import Path

import pytest

from tests.fixtures.tools import ROOT, installed_node_example, tool


@pytest.fixture(scope="session")
def node_client() -> list[str]:
    """The Node example as a command; `--target` is still to be added."""
    script: Path = installed_node_example()
    return [tool("node"), str(script), "--proto", str(ROOT / "protos" / "baton.proto")]
