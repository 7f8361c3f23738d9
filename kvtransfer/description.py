"""What two pools tell each other when they meet, and whether they go together."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.errors import PairingRefused

POOL_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """A sealed memfd that a peer opens as /proc/PID/fd/FD."""

    pid: int
    fd: int
    inode: int  # proves that the file opened is the one meant
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PoolDescription:
    fingerprint: bytes  # digest of model, dtype, block size and KV layout
    block_bytes: int  # one block with all its layers
    num_blocks: int
    host_id: str  # see `host_id`
    pool_id: bytes  # random: tells this pool from that of a later process at the same address
    shared_memory: SharedMemoryHandle | None = None  # None: nobody may map this pool

    @property
    def size_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


def check_compatible(mine: PoolDescription, theirs: PoolDescription) -> None:
    """Two pools may exchange blocks, however many each has. Raises PairingRefused, which names the field."""
    if mine.fingerprint != theirs.fingerprint:
        raise PairingRefused("fingerprint", mine.fingerprint.hex(), theirs.fingerprint.hex())
    if mine.block_bytes != theirs.block_bytes:
        raise PairingRefused("block_bytes", f"{mine.block_bytes} bytes", f"{theirs.block_bytes} bytes")
    handle = theirs.shared_memory
    if handle is not None and handle.size_bytes < theirs.size_bytes:
        raise PairingRefused("shared_memory", f"{theirs.size_bytes} bytes wanted", f"{handle.size_bytes} bytes")


def can_map(mine: PoolDescription, theirs: PoolDescription) -> bool:
    """Whether their pool lies in memory that this process should be able to map."""
    return theirs.shared_memory is not None and mine.host_id == theirs.host_id


def host_id() -> str:
    """The running kernel and the PID namespace: where equal, /proc/PID means the same process to both.

    A system that does not tell is taken for a host of its own, which shares memory with nobody.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(16)
