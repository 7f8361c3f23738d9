"""The model that a worker serves, and its adapters: configuration read, pool sized."""

from collections.abc import Sequence

import torch

from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import adapter_digest
from baton.engine.parallel.wire import RankOptions
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.protos import session_pb2
from baton.service.registry.worker_record import AdapterFolder
from baton.service.worker_config import WorkerConfig
from baton.worker.transfer.rank import RANK_MODULE


def describe_adapters(adapters: Sequence[AdapterFolder]) -> list[session_pb2.Adapter]:
    """For WorkerInfo. Reads the files. Raises: ModelError."""
    return [session_pb2.Adapter(name=each.name, digest=adapter_digest(each.folder)) for each in adapters]


def adapter_number(worker: session_pb2.WorkerInfo, name: str) -> int:
    """The engine's number of the adapter of that name; 0 for an empty name. Raises: ValueError."""
    if not name:
        return 0
    for number, adapter in enumerate(worker.adapters, start=1):
        if adapter.name == name:
            return number
    raise ValueError(f"there is no adapter {name!r} here")


def prepare(config: WorkerConfig, step: LargestStep, nice: int = 0) -> PreparedModel:
    """Blocks. With `--kv-memory auto` on a GPU the weights are loaded to find how much memory is left.

    `step`: the largest that this worker computes. `nice`: how far processes of further ranks stand back. Raises:
    ModelError, RankLost.
    """
    kv_bytes = config.kv_memory_bytes
    asked = ModelOptions(
        config.model,
        torch.device(config.device),
        config.dtype,
        config.block_size,
        kv_bytes or 0,
        config.max_model_len,
        config.kv_cache_dtype,
        config.quantize,
        config.tensor_parallel,
        None if config.cores is None else tuple(sorted(config.cores)),
    )
    if kv_bytes is not None:
        return prepare_model(asked)
    adapters = AdapterSet() if config.adapter else None
    ranks = RankOptions(entry=RANK_MODULE, nice=nice)
    return prepare_with_spare_memory(asked, step, config.gpu_memory_utilization, adapters, ranks=ranks)
