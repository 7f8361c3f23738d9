"""Fixtures that more than one folder of tests uses."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fixtures.tools import ROOT, installed_node_example, tool

if find_spec("hypothesis") is not None:  # a machine for GPUs may have none
    from hypothesis import settings

    settings.register_profile("baton", deadline=None)  # how long an example takes says only how busy the machine is
    settings.load_profile("baton")


@pytest.fixture(scope="session")
def node_client() -> list[str]:
    """The Node example as a command; `--target` is still to be added."""
    script: Path = installed_node_example()
    return [tool("node"), str(script), "--proto", str(ROOT / "protos" / "baton.proto")]
