"""The adapters of a worker: its description of them, and their numbers by name."""

from collections.abc import Sequence

from engine.lora.adapter_file import adapter_digest
from protos import session_pb2
from service.adapter_folder import AdapterFolder


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
