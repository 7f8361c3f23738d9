"""The first work of an engine's thread: its cores, its priority, its CUDA stream, and the model's warm-up."""

import os
from collections.abc import Callable

import torch

from engine.core_use import SpareCores
from engine.parallel.followers import cores_of, threads_of
from engine.parallel.shard import Shard
from engine.priority import count_as_idle
from engine.runner import Runner
from kernels.native.library import native_library


def thread_preparation(
    cores: frozenset[int] | None,
    device: torch.device,
    runner: Runner,
    nice: int = 0,
    priority: int = 0,
    warm: bool = False,
    spare: SpareCores | None = None,
) -> Callable[[], None]:
    """The first work of the engine's thread: stay on its cores, use as many threads as there are, warm the model.

    `cores` are those of all ranks, of which the thread takes the first one's. `nice`: how far it, and the threads that
    it starts, stand back behind whatever else wants these cores. `priority`: of its CUDA stream; less comes first.
    `warm`: another thread has warmed this model up before, and blocks are owned by now. `spare`: see SpareCores.
    """
    first = Shard(0, 1 if runner.followers is None else runner.followers.degree)
    dealt = None if cores is None else tuple(sorted(cores))
    own = cores_of(first, dealt)

    def prepare() -> None:
        if own is not None or (first.degree > 1 and device.type == "cpu"):
            torch.set_num_threads(threads_of(first, dealt))
        if own is not None:
            os.sched_setaffinity(0, own)
        if spare is not None and (native := native_library()) is not None:
            native.threads.borrow(spare.cores, spare.in_use)
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)  # Linux: of this thread alone
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched on the thread's current device
            torch.cuda.synchronize(device)  # weights and pool were made on another stream
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=priority))
        if not warm:
            runner.warm_up()
        if nice:
            count_as_idle()  # not before: the threads that help it to compute have only its niceness

    return prepare
