"""Hostile input for a fixed time: a few seconds in the suite, as long as one likes with `--hostile-seconds`."""

import pytest

from tests.router.conftest import pair, settings
from tests.router.http.conftest import gateway, model_name, stopped_pair

__all__ = ["gateway", "model_name", "pair", "settings", "stopped_pair"]
SECONDS = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile-seconds", type=float, default=SECONDS, help="how long each hostile test feeds input")


@pytest.fixture
def hostile_s(pytestconfig: pytest.Config) -> float:
    """The option is there only where this folder is named on the command line."""
    return float(pytestconfig.getoption("--hostile-seconds", SECONDS))
