"""Fixtures of kernels: random inputs that repeat, and the native kernels of each level."""

import pytest
import torch

from baton.kernels.native.library import NativeLibrary
from tests.fixtures.native_levels import TESTED, native_at


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=TESTED)
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    return native_at(request.param)
