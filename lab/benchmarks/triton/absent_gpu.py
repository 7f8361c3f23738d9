"""Driver of a GPU that does not exist: with it, Triton specialises, compiles, loads and launches kernels as on a
real one, but nothing runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from baton.kernels.triton.launch import SHARED_BYTES, Device

MOST_THREADS = 1024  # maximum number of threads of a program


class AbsentGpu:
    """Driver with the methods that Triton calls, under Triton's names."""

    def __init__(self, arch: int, number: int) -> None:
        """Create a driver. `arch`: 10 * major + minor of its compute capability."""
        self.utils = self
        self._arch, self._number = arch, number

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[Device(self._arch, 1).row]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        module = function = registers = spilled = 0
        return module, function, registers, spilled, MOST_THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return _launch


def _launch(*arguments: object) -> None:
    pass


@contextmanager
def absent_gpu(arch: int, number: int | None = None) -> Iterator[None]:
    """Inside the `with` block, pretend that Triton's current device has the architecture `arch`.

    `number`: device number, by which Triton caches compiled kernels; None: equal to `arch`.
    """
    before = driver._active  # not `driver.active`, which raises without a GPU
    driver.set_active(AbsentGpu(arch, arch if number is None else number))
    try:
        yield
    finally:
        driver._active = before
