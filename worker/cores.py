"""Which GPU and cores a worker computes on, and another's cores that it may use meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from baton.engine.runner.thread_preparation import CoreUse, SpareCores


def gpu_id(device: torch.device) -> str:
    """Its UUID; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class OwnCores(Protocol):
    @property
    def core_use(self) -> Path | None: ...


class Borrowing(Protocol):
    @property
    def spare_cores(self) -> frozenset[int] | None: ...

    @property
    def spare_core_use(self) -> Path | None: ...


def mark_busy(config: OwnCores) -> Callable[[bool], None]:
    """For the engine's thread. Raises: OSError."""
    return (lambda busy: None) if config.core_use is None else CoreUse(config.core_use).mark


def spare_cores(config: Borrowing) -> SpareCores | None:
    """Raises: OSError."""
    if config.spare_cores is None or config.spare_core_use is None:
        return None
    return SpareCores.of(config.spare_cores, config.spare_core_use)
