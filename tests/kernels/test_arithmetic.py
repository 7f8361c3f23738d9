"""The name of what rounds tells processes apart that may compute other bits."""

import pytest
import torch

import baton.kernels.arithmetic
from baton.kernels.arithmetic import arithmetic
from baton.kernels.native.build import processor_level

CPU = torch.device("cpu")


@pytest.mark.usefixtures("native_kernels")
def test_kernels_of_another_level_or_none_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    native = arithmetic(CPU)
    assert native.startswith(f"kernels-{processor_level().lower()}-")
    assert native == arithmetic(CPU)
    monkeypatch.setattr(baton.kernels.arithmetic, "native_library", lambda: None)
    assert arithmetic(CPU).startswith("PyTorch on ")


def test_several_ranks_add_up_in_another_order() -> None:
    assert arithmetic(CPU, ranks=2) == f"{arithmetic(CPU)}, 2 ranks"
