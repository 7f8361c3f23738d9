"""Fixtures of kernels: reproducible random inputs, and the native kernels of each level."""

from collections.abc import Iterator

import pytest
import torch

from baton.kernels.native.library import NativeLibrary
from tests.fixtures.native_levels import TESTED, native_at


@pytest.fixture(autouse=True)
def seed_and_threads() -> Iterator[None]:
    """Seed torch, and restore its number of threads after the test."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=TESTED)
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    return native_at(request.param)
