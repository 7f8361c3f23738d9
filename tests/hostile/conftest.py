"""Option `--hostile-seconds`: how long each hostile test sends input; a second by default."""

import pytest

from tests.router.conftest import pair, settings
from tests.router.http.conftest import gateway, model_name, stopped_pair

__all__ = ["gateway", "model_name", "pair", "settings", "stopped_pair"]
SECONDS = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile-seconds", type=float, default=SECONDS, help="how long each hostile test feeds input")


@pytest.fixture
def hostile_s(pytestconfig: pytest.Config) -> float:
    """Duration of hostile input. The option exists only if this folder is given on the command line."""
    return float(pytestconfig.getoption("--hostile-seconds", SECONDS))
