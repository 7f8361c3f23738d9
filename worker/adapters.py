"""The adapters of a worker: what it says of them, how they are loaded, and what requests mean by a name."""

from collections.abc import Sequence

import torch

from engine.lora.adapter_file import adapter_digest, read_adapter
from engine.lora.adapters import AdapterSet
from engine.prepare import PreparedModel
from engine.runner import Runner
from protos import session_pb2
from service.adapter_folder import AdapterFolder


def describe_adapters(adapters: Sequence[AdapterFolder]) -> list[session_pb2.Adapter]:
    """For WorkerInfo. Reads the files. Raises: ModelError."""
    return [session_pb2.Adapter(name=each.name, digest=adapter_digest(each.folder)) for each in adapters]


def load_runner(
    prepared: PreparedModel, storage: torch.Tensor, adapters: Sequence[AdapterFolder], host_slots: int = 0
) -> Runner:
    """The model and its adapters, numbered from 1 in their order. Blocks. Raises: ModelError.

    `host_slots`: blocks of host memory that plans may swap to.
    """
    if not adapters:
        return prepared.load(storage, progress=False, host_slots=host_slots)
    loaded = AdapterSet()
    runner = prepared.load(storage, progress=False, adapters=loaded, host_slots=host_slots)
    for each in adapters:
        loaded.add(each.name, read_adapter(each.folder))
    return runner


def adapter_number(worker: session_pb2.WorkerInfo, name: str) -> int:
    """What the engine calls the adapter of that name; 0 for an empty one. Raises: ValueError."""
    if not name:
        return 0
    for number, adapter in enumerate(worker.adapters, start=1):
        if adapter.name == name:
            return number
    raise ValueError(f"there is no adapter {name!r} here")
