"""Process of a further rank of a worker on GPUs, with its part of the pool: `python -m
baton.worker.transfer.rank FD`.
"""

import json
import sys

import torch

from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.rank_process import main
from baton.kvtransfer.cuda_ipc import open_part
from baton.kvtransfer.description import DeviceMemoryHandle
from baton.kvtransfer.transport import PeerUnreachable

RANK_MODULE = "baton.worker.transfer.rank"


def write_handle(handle: DeviceMemoryHandle) -> str:
    return json.dumps([handle.handle.hex(), handle.offset_bytes, handle.size_bytes])


def read_handle(text: str) -> DeviceMemoryHandle:
    handle, offset_bytes, size_bytes = json.loads(text)
    return DeviceMemoryHandle(bytes.fromhex(handle), offset_bytes, size_bytes)


def _open(text: str, device: torch.device) -> torch.Tensor:
    """Open this rank's part of the pool by its handle. Raises: RankLost."""
    try:
        return open_part(read_handle(text), device)
    except PeerUnreachable as error:
        raise RankLost(str(error)) from error


if __name__ == "__main__":
    sys.exit(main(_open))
