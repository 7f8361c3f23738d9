"""Description of a worker's KV pool for its peers, and choice of the transport between two pools."""

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
    """Sealed memfd, which a peer opens as /proc/PID/fd/FD."""

    pid: int
    fd: int
    inode: int  # identifies the file, since pid and fd may be reused
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemoryHandle:
    """GPU memory that another process opens with cuIpcOpenMemHandle."""

    handle: bytes  # CUipcMemHandle, 64 bytes
    offset_bytes: int  # offset of the pool in the exported memory
    size_bytes: int  # bytes of the pool


@dataclass(frozen=True, slots=True)
class NixlHandle:
    """Pool that NIXL agents of other processes may read."""

    metadata: bytes  # opaque metadata of the agent
    address: int  # address of the pool in the process that owns it
    device: int
    memory: str  # kind of memory in NIXL's terms: DRAM or VRAM


@dataclass(frozen=True, slots=True)
class PoolDescription:
    fingerprint: bytes  # digest of model, dtype, block size and KV layout
    block_bytes: int  # bytes of a block, with all layers and heads
    num_blocks: int
    host_id: str  # result of `host_id()`, equal for processes that can share memory
    pool_id: bytes  # random id, which distinguishes this pool from pools of later processes at the same address
    shared_memory: SharedMemoryHandle | None = None  # None: no other process may map this pool
    device_memory: tuple[DeviceMemoryHandle, ...] = ()  # one handle per part; empty: no exported GPU memory
    group_backend: str = ""  # torch.distributed backend that sends the pool's blocks; empty: none
    parts: int = 1  # number of parts, one per rank of the worker: see PoolShape
    rows: int = 1  # rows of a block: see PoolShape
    nixl: NixlHandle | None = None  # None: the pool is not registered with NIXL
    tcp_port: int = 0  # port on the worker's host from which peers read blocks; 0: blocks are not served over TCP
    versions: Versions = OWN  # versions of the process that owns the pool
    checkpoint: bytes = b""  # digest of the weights; empty: the process's release does not announce a digest
    layout: str = ""  # description of the KV layout; empty: the process's release does not announce a layout

    @property
    def size_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def shape(self) -> PoolShape:
        return PoolShape(self.num_blocks, self.block_bytes, self.rows, self.parts)


def check_compatible(mine: PoolDescription, theirs: PoolDescription) -> None:
    """Check that the two pools may exchange blocks. Raises: PairingRefused, which names the field that differs."""
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
        sizes = ", ".join(str(part.size_bytes) for part in theirs.device_memory)
        raise PairingRefused("device_memory", f"at least {theirs.shape.part_bytes} bytes expected", f"{sizes} bytes")
    handle = theirs.shared_memory
    if handle is not None and handle.size_bytes < theirs.size_bytes:
        expected = f"at least {theirs.size_bytes} bytes expected"
        raise PairingRefused("shared_memory", expected, f"{handle.size_bytes} bytes")


def _of_other_content(mine: PoolDescription, theirs: PoolDescription) -> PairingRefused:
    """Return the error for different fingerprints. The error names layout or checkpoint if the peer announces these."""
    if theirs.layout and mine.layout != theirs.layout:
        return PairingRefused("layout", *differing(mine.layout, theirs.layout))
    if theirs.checkpoint and mine.checkpoint != theirs.checkpoint:
        return PairingRefused("checkpoint", mine.checkpoint.hex(), theirs.checkpoint.hex())
    return PairingRefused("fingerprint", mine.fingerprint.hex(), theirs.fingerprint.hex())


def can_map(mine: PoolDescription, theirs: PoolDescription) -> bool:
    """Return whether this process can map the peer's pool: the pool is shared memory on this host."""
    return theirs.shared_memory is not None and mine.host_id == theirs.host_id


def host_id() -> str:
    """Return an id of the running kernel and PID namespace. Processes with equal ids see the same /proc/PID.

    If /proc is not readable, the id is random, so that the process shares memory with no other process.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Ways:
    possible: tuple[TransportName, ...]  # possible transports, the preferred one first
    reasons: tuple[str, ...]  # names of impossible transports, each with the reason


def possible_ways(mine: PoolDescription, theirs: PoolDescription, own_device: str, choice: TransportChoice) -> Ways:
    """Return the possible transports from the peer's pool to this one. `own_device`: torch device type of this pool.

    Raises: PeerUnreachable if the requested transport is impossible.
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
                return "this worker's pool is not in host memory"
            if theirs.shared_memory is None:
                return "the peer's pool is not in shared memory"
            return None if can_map(mine, theirs) else _OTHER_HOST
        case "cuda_ipc":
            if own_device != "cuda":
                return "this worker's pool is not on a GPU"
            if len(theirs.device_memory) != theirs.parts:
                return "the peer's pool is not in GPU memory that other processes can open"
            return None if mine.host_id == theirs.host_id else _OTHER_HOST
        case "nixl":
            if mine.nixl is None:
                return "nixl is not available on this worker; install the nixl extra and set --transfer-interface"
            return None if theirs.nixl is not None else "nixl is not available on the peer"
        case "nccl" | "gloo":
            if mine.group_backend != name:
                return f"{name} is not available on this worker; set --transfer-interface"
            return None if theirs.group_backend == name else f"{name} is not available on the peer"
        case "tcp":
            if own_device != "cpu":
                return "this worker's pool is not in host memory"
            return None if theirs.tcp_port else "the peer has no TCP port for KV"
        case "grpc":
            return None
