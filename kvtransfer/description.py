"""The description of a pool that a worker sends to a peer, and which transports work between two pools."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import PairingRefused, PeerUnreachable
from baton.versions import OWN, Versions, differing, refusal

POOL_ID_BYTES = 16
TransportChoice = Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "tcp", "grpc"]
TransportName = Literal["shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "tcp", "grpc"]
FASTEST_FIRST: tuple[TransportName, ...] = get_args(TransportName)
_OTHER_HOST = "the peer runs on another host or in another PID namespace"


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """A sealed memfd that a peer opens as /proc/PID/fd/FD."""

    pid: int
    fd: int
    inode: int  # proves that the file opened is the one meant
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemoryHandle:
    """Memory of a GPU that another process opens with cuIpcOpenMemHandle."""

    handle: bytes  # CUipcMemHandle, 64 bytes
    offset_bytes: int  # of the pool within the exported memory
    size_bytes: int  # of the pool


@dataclass(frozen=True, slots=True)
class NixlHandle:
    """A pool that NIXL agents of other processes may read."""

    metadata: bytes  # of the agent, opaque
    address: int  # where the pool begins, in its own process
    device: int
    memory: str  # NIXL's name of its kind: DRAM or VRAM


@dataclass(frozen=True, slots=True)
class PoolDescription:
    fingerprint: bytes  # digest of model, dtype, block size and KV layout
    block_bytes: int  # one block with all its layers and heads
    num_blocks: int
    host_id: str  # see `host_id`
    pool_id: bytes  # random: distinguishes this pool from that of a later process at the same address
    shared_memory: SharedMemoryHandle | None = None  # None: no other process may map this pool
    device_memory: tuple[DeviceMemoryHandle, ...] = ()  # of each part; none: not on a GPU, or not to be opened
    group_backend: str = ""  # of torch.distributed, by which its blocks may be sent; empty: by none
    parts: int = 1  # how many ranks share the heads, see PoolShape
    rows: int = 1  # layers x (keys, values)
    nixl: NixlHandle | None = None  # None: not registered with NIXL
    tcp_port: int = 0  # on which its blocks are read, at the host of its worker; 0: on none
    versions: Versions = OWN  # of its process
    checkpoint: bytes = b""  # digest of the weights; empty: a release that does not announce it, as is the next
    layout: str = ""  # of KV, in words

    @property
    def size_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def shape(self) -> PoolShape:
        return PoolShape(self.num_blocks, self.block_bytes, self.rows, self.parts)


def check_compatible(mine: PoolDescription, theirs: PoolDescription) -> None:
    """Two pools may exchange blocks, however many each has. Raises PairingRefused, which names the field."""
    if refusal(mine.versions, theirs.versions):
        raise PairingRefused("versions", str(mine.versions), str(theirs.versions))
    if mine.fingerprint != theirs.fingerprint:
        raise _of_other_content(mine, theirs)
    if mine.block_bytes != theirs.block_bytes:
        raise PairingRefused("block_bytes", f"{mine.block_bytes} bytes", f"{theirs.block_bytes} bytes")
    if mine.parts != theirs.parts and mine.rows != theirs.rows:
        raise PairingRefused("rows", f"{mine.rows} rows", f"{theirs.rows} rows")
    if theirs.parts < 1 or theirs.rows < 1 or theirs.block_bytes % (theirs.parts * theirs.rows):
        raise PairingRefused("parts", f"{mine.parts} parts", f"{theirs.parts} parts of {theirs.rows} rows")
    if any(part.size_bytes < theirs.shape.part_bytes for part in theirs.device_memory):
        raise PairingRefused("device_memory", f"{theirs.shape.part_bytes} bytes wanted", "less")
    handle = theirs.shared_memory
    if handle is not None and handle.size_bytes < theirs.size_bytes:
        raise PairingRefused("shared_memory", f"{theirs.size_bytes} bytes wanted", f"{handle.size_bytes} bytes")


def _of_other_content(mine: PoolDescription, theirs: PoolDescription) -> PairingRefused:
    """Names the part of the fingerprint that differs, where both announce the parts."""
    if theirs.layout and mine.layout != theirs.layout:
        return PairingRefused("layout", *differing(mine.layout, theirs.layout))
    if theirs.checkpoint and mine.checkpoint != theirs.checkpoint:
        return PairingRefused("checkpoint", mine.checkpoint.hex(), theirs.checkpoint.hex())
    return PairingRefused("fingerprint", mine.fingerprint.hex(), theirs.fingerprint.hex())


def can_map(mine: PoolDescription, theirs: PoolDescription) -> bool:
    """Return whether this process should be able to map the peer's pool."""
    return theirs.shared_memory is not None and mine.host_id == theirs.host_id


def host_id() -> str:
    """The running kernel and the PID namespace: where equal, /proc/PID means the same process to both.

    A system that does not report them counts as a host of its own, which shares memory with no other.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Ways:
    possible: tuple[TransportName, ...]  # to be tried in this order
    reasons: tuple[str, ...]  # why each faster one is not among them


def possible_ways(mine: PoolDescription, theirs: PoolDescription, own_device: str, choice: TransportChoice) -> Ways:
    """Return the possible transports. `own_device`: the torch device type of our pool. Raises: PeerUnreachable if the
    requested transport is impossible.
    """
    possible: list[TransportName] = []
    reasons: list[str] = []
    for name in FASTEST_FIRST:
        if choice not in ("auto", name):
            continue
        hindrance = _hindrance(name, mine, theirs, own_device)
        if hindrance is None:
            possible.append(name)
        elif choice == name:
            raise PeerUnreachable(hindrance)
        else:
            reasons.append(f"{name}: {hindrance}")
    return Ways(tuple(possible), tuple(reasons))


def _hindrance(name: TransportName, mine: PoolDescription, theirs: PoolDescription, own_device: str) -> str | None:
    match name:
        case "shared_memory":
            if own_device != "cpu":
                return "our pool is not in host memory"
            if theirs.shared_memory is None:
                return "its pool is not in shared memory"
            return None if can_map(mine, theirs) else _OTHER_HOST
        case "cuda_ipc":
            if own_device != "cuda":
                return "our pool is not on a GPU"
            if len(theirs.device_memory) != theirs.parts:
                return "its pool is not in memory of a GPU that others may open"
            return None if mine.host_id == theirs.host_id else _OTHER_HOST
        case "nixl":
            if mine.nixl is None:
                return "nixl is not available here (needs the nixl extra and --transfer-interface)"
            return None if theirs.nixl is not None else "nixl is not available there"
        case "nccl" | "gloo":
            if mine.group_backend != name:
                return f"{name} is not available here (needs --transfer-interface)"
            return None if theirs.group_backend == name else f"{name} is not available there"
        case "tcp":
            if own_device != "cpu":
                return "our pool is not in host memory"
            return None if theirs.tcp_port else "no port for it is open there"
        case "grpc":
            return None
