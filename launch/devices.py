"""The devices and CPU cores of this machine, and which cores each process gets.

Devices are found without keeping torch or a CUDA context in the `up` process. The plan of cores is pure: cores in, plan
out.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from baton.launch import CommandFailed
from baton.text.host.memory import total_bytes

PROBE_TIMEOUT_S = 120.0
PROBE = """
import json, torch
gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
print(json.dumps([torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]))
"""
GIB = 2**30
CPU_KV_BYTES = GIB
CPU_KV_SHARE = 0.1
GPU_UTILIZATION = 0.9  # by all workers of a GPU, where they measure the memory left for KV


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DeviceError(CommandFailed):
    """The device that was asked for is not there; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The device kind that workers use, and its amounts. `gpu_free_bytes` has one entry per GPU, none on CPU."""

    cores: tuple[int, ...]
    memory_bytes: int
    gpu_free_bytes: tuple[int, ...] = ()

    def device(self, worker: int, tensor_parallel: int = 1) -> str:
        """Workers take the GPUs in turn, `tensor_parallel` side by side each: this is the first of them."""
        if not self.gpu_free_bytes:
            return "cpu"
        return f"cuda:{worker % self._groups(tensor_parallel) * tensor_parallel}"

    @property
    def default_kv_bytes(self) -> int | None:
        """Per worker: at most 1 GiB of a CPU's memory. None: workers on a GPU measure what is left."""
        return None if self.gpu_free_bytes else min(CPU_KV_BYTES, int(self.memory_bytes * CPU_KV_SHARE))

    def worker_counts(self, prefill: int | None, decode: int | None, tensor_parallel: int = 1) -> tuple[int, int]:
        """Numbers of prefill and decode workers. None: the GPUs that the other role leaves, half of them for each role
        where neither is given; a lone GPU has a decode worker that computes its prompts. On a CPU, one of each role.

        Raises DeviceError where `tensor_parallel` exceeds the number of GPUs.
        """
        if not self.gpu_free_bytes:
            return 1 if prefill is None else prefill, 1 if decode is None else decode
        groups = self._groups(tensor_parallel)
        if prefill is None:
            prefill = groups // 2 if decode is None else max(groups - decode, 0)
        return prefill, max(groups - prefill, 1) if decode is None else decode

    def gpu_share(self, workers: int, tensor_parallel: int = 1) -> float:
        """Return the share of a GPU's memory for each worker."""
        return GPU_UTILIZATION / -(-workers // self._groups(tensor_parallel))

    def _groups(self, tensor_parallel: int) -> int:
        """Workers that have GPUs of their own. Raises DeviceError where there is none."""
        groups = len(self.gpu_free_bytes) // tensor_parallel
        if not groups:
            raise DeviceError(f"--tensor-parallel is {tensor_parallel}; there are {len(self.gpu_free_bytes)} GPUs")
        return groups


def inspect_machine(choice: DeviceChoice) -> Machine:
    """Inspect the machine. Raises: DeviceError if CUDA is requested and there is none."""
    gpus = () if choice is DeviceChoice.CPU else _free_gpu_bytes()
    if choice is DeviceChoice.CUDA and not gpus:
        raise DeviceError("--device cuda: no GPU that this build of torch can use (see: nvidia-smi)")
    return Machine(tuple(sorted(os.sched_getaffinity(0))), total_bytes(), tuple(gpus))


def _free_gpu_bytes() -> Sequence[int]:
    if not Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi") is None:
        return ()
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT_S
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise DeviceError(f"there is an NVIDIA driver, but torch could not be asked for GPUs: {error}") from error
    return tuple(map(int, json.loads(probe.stdout)))


@dataclass(frozen=True, slots=True)
class CorePlan:
    router: tuple[int, ...]
    # Threads that copy KV, in any worker.
    transfer: tuple[int, ...]
    # One entry per worker.
    decode: tuple[tuple[int, ...], ...]
    prefill: tuple[tuple[int, ...], ...]


def plan_cores(available: Sequence[int], prefill: int, decode: int) -> CorePlan:
    """Splits `available` among `decode` workers, at least one, and `prefill` workers.

    Workers come first, on disjoint cores while there are enough: a decode step must not wait for any prompt. Router,
    Redis and the copying of KV take a core of their own if one is left, else that of the last prefill worker, never
    decode's. With more workers than cores they share, round robin.

    Without prefill workers no step is to be kept from another's: decode workers divide all cores, and the router and
    the rest run wherever they find one free.
    """
    cores, workers = list(available), prefill + decode
    if not prefill:
        groups = _deal(cores, decode) if len(cores) >= decode else _in_turn(cores, decode)
        return CorePlan(router=tuple(cores), transfer=tuple(cores), decode=tuple(groups), prefill=())
    if len(cores) > workers:
        *cores, last = cores
        groups = _deal(cores, workers)
        router: tuple[int, ...] = (last,)
    else:
        groups = _in_turn(cores, workers)
        router = groups[-1]
    return CorePlan(router=router, transfer=router, decode=tuple(groups[:decode]), prefill=tuple(groups[decode:]))


def _in_turn(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    return [(cores[worker % len(cores)],) for worker in range(workers)]


def _deal(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Consecutive runs of nearly equal length; the last groups, which are prefill's, take the remainder."""
    each, extra = divmod(len(cores), workers)
    groups, start = [], 0
    for worker in range(workers):
        end = start + each + (worker >= workers - extra)
        groups.append(tuple(cores[start:end]))
        start = end
    return groups


def write_cores(cores: Sequence[int]) -> str:
    """(0, 1) -> `0,1`, as the `--cores` flag of every process reads it."""
    return ",".join(map(str, cores))
