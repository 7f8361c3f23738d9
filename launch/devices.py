"""Devices and CPU cores of this machine, and the cores of each process.

A child process asks torch for GPUs, so that `up` keeps neither torch nor a CUDA context.
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
MAX_ROUTERS = 16
CPU_WORKERS_PER_ROUTER = 8
CORES_PER_ROUTER = 8
GPU_UTILIZATION = 0.9  # share of a GPU's memory that all workers on it use together


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DeviceError(CommandFailed):
    """Error: the requested device does not exist; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, memory and GPUs for workers. `gpu_free_bytes`: one entry per GPU; empty if workers use the CPU."""

    cores: tuple[int, ...]
    memory_bytes: int
    gpu_free_bytes: tuple[int, ...] = ()

    def device(self, worker: int, tensor_parallel: int = 1) -> str:
        """Return the first device of the worker with this number.

        Each worker uses a group of `tensor_parallel` consecutive GPUs. If there are fewer groups than workers, several
        workers share a group.
        """
        if not self.gpu_free_bytes:
            return "cpu"
        return f"cuda:{worker % self._groups(tensor_parallel) * tensor_parallel}"

    @property
    def default_kv_bytes(self) -> int | None:
        """Return the default KV memory of a worker: at most 1 GiB on a CPU; None on a GPU, where workers measure free
        memory.
        """
        return None if self.gpu_free_bytes else min(CPU_KV_BYTES, int(self.memory_bytes * CPU_KV_SHARE))

    def worker_counts(self, prefill: int | None, decode: int | None, tensor_parallel: int = 1) -> tuple[int, int]:
        """Return the numbers of prefill and decode workers. `prefill`, `decode` None: this function chooses the number.

        On a CPU, it chooses 1 per role. On GPUs, each worker needs a group of `tensor_parallel` GPUs: a role gets the
        groups that the other role leaves, or half of all groups if neither number is given. A single group gets a
        decode worker that also computes the prompts. Raises: DeviceError without a complete group.
        """
        if not self.gpu_free_bytes:
            return 1 if prefill is None else prefill, 1 if decode is None else decode
        groups = self._groups(tensor_parallel)
        if prefill is None:
            prefill = groups // 2 if decode is None else max(groups - decode, 0)
        return prefill, max(groups - prefill, 1) if decode is None else decode

    def router_count(self, workers: int) -> int:
        """Return the default number of routers: one for each GPU worker or every 8 CPU workers, at most one for every
        8 cores, and at least 1.
        """
        needed = workers if self.gpu_free_bytes else workers // CPU_WORKERS_PER_ROUTER
        return max(1, min(needed, len(self.cores) // CORES_PER_ROUTER, MAX_ROUTERS))

    def gpu_share(self, workers: int, tensor_parallel: int = 1) -> float:
        """Return the share of a GPU's memory that each of `workers` workers may use."""
        return GPU_UTILIZATION / -(-workers // self._groups(tensor_parallel))

    def _groups(self, tensor_parallel: int) -> int:
        """Return the number of complete groups of `tensor_parallel` GPUs. Raises: DeviceError if it is 0."""
        groups = len(self.gpu_free_bytes) // tensor_parallel
        if not groups:
            raise DeviceError(
                f"--tensor-parallel: {tensor_parallel} exceeds the {len(self.gpu_free_bytes)} GPUs of this machine"
            )
        return groups


def inspect_machine(choice: DeviceChoice) -> Machine:
    """Return the cores, memory and GPUs of this machine. Raises: DeviceError if CUDA is requested and no GPU is
    usable.
    """
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
        raise DeviceError(f"torch cannot list the GPUs of this machine: {error}; --device cpu needs none") from error
    return tuple(map(int, json.loads(probe.stdout)))


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each process; `decode` and `prefill` have one entry per worker."""

    router: tuple[int, ...]  # shared by all routers
    transfer: tuple[int, ...]  # cores of the threads that copy KV, shared by all workers
    decode: tuple[tuple[int, ...], ...]
    prefill: tuple[tuple[int, ...], ...]


def plan_cores(available: Sequence[int], prefill: int, decode: int, routers: int = 1) -> CorePlan:
    """Divide cores among at least one decode worker, the prefill workers and the routers.

    Workers get disjoint cores if there are enough, so that a decode step waits for no prompt; otherwise several workers
    share a core. Routers, Redis and KV copies get together as many cores as there are routers, fewer if workers need
    them; without a core left, they share that of the last prefill worker. Without prefill workers, decode workers
    divide all cores, and routers may use any of them.
    """
    cores, workers = list(available), prefill + decode
    if not prefill:
        groups = _deal(cores, decode) if len(cores) >= decode else _in_turn(cores, decode)
        return CorePlan(router=tuple(cores), transfer=tuple(cores), decode=tuple(groups), prefill=())
    if len(cores) > workers:
        last = max(workers, len(cores) - routers)
        groups, router = _deal(cores[:last], workers), tuple(cores[last:])
    else:
        groups = _in_turn(cores, workers)
        router = groups[-1]
    return CorePlan(router=router, transfer=router, decode=tuple(groups[:decode]), prefill=tuple(groups[decode:]))


def _in_turn(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    return [(cores[worker % len(cores)],) for worker in range(workers)]


def _deal(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Divide cores into one group per worker. The last groups, of prefill workers, may have one more core."""
    each, extra = divmod(len(cores), workers)
    groups, start = [], 0
    for worker in range(workers):
        end = start + each + (worker >= workers - extra)
        groups.append(tuple(cores[start:end]))
        start = end
    return groups


def write_cores(cores: Sequence[int]) -> str:
    """Format cores for the flag `--cores`: (0, 1) -> `0,1`."""
    return ",".join(map(str, cores))
