"""A checkpoint for tests to which its family does not matter."""

from pathlib import Path

import pytest

from tests.fixtures.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama, which no test changes."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "base", "llama")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another tiny Llama, which no test changes."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=11)
