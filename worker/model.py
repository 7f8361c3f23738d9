"""The model that a worker serves: its configuration read, its pool sized."""

import torch

from engine.kv_memory import LargestStep, prepare_with_spare_memory
from engine.lora.adapters import AdapterSet
from engine.parallel.orders import RankOptions
from engine.prepare import ModelOptions, PreparedModel, prepare_model
from service.worker_config import WorkerConfig
from worker.rank import RANK_MODULE


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
