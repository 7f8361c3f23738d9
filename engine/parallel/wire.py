"""Messages from the leader to the other ranks over a socket: JSON commands, and plans as plain numbers."""

import json
import socket
import struct
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Self

from baton.engine.request import BlockCopy, BlockSwap, Chunk, Plan

HEADER = struct.Struct("<BQ")  # kind of frame, payload size in bytes
SIZES = struct.Struct("<QQ")  # payload of RECORD: number of rows, blocks per sequence
START, POOL, PLAN, LOGITS, RECORD, MEASURE, MEMORY, READY, FAILED, MOVED, ADD_ADAPTER, REMOVE_ADAPTER = range(1, 13)
READ_WEIGHTS, ADD_WEIGHTS, REMOVE_WEIGHTS = range(13, 16)


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of the other ranks' processes, and the location of their parts of the pool."""

    storage_fd: int | None = None  # descriptor of shared memory with all ranks' parts, in rank order
    part_handles: tuple[str, ...] = ()  # one handle per rank; without handles and storage_fd, ranks allocate
    entry: str = "baton.engine.parallel.rank_process"  # module that the process runs
    nice: int = 0  # niceness of the processes


@dataclass(frozen=True, slots=True)
class Order:
    """Command to the other ranks: a dataclass of plain values, sent as JSON."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_bytes(cls, payload: bytes) -> Self:
        return cls(**json.loads(payload))


@dataclass(frozen=True, slots=True)
class RankStart(Order):
    """Command to load a rank's part of the model. The descriptor of the ranks' shared file is sent after it."""

    folder: str
    device: str  # device of the leader (rank 0); rank r uses the device whose index is higher by r
    dtype: str  # compute dtype, as a key of DTYPES
    quantize: str
    degree: int
    cores: tuple[int, ...] | None  # CPU cores of all ranks together; None: not bound
    entry: str
    nice: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RankPool(Order):
    """Command to create or map a rank's part of the pool."""

    kv_dtype: str  # dtype of KV, as a key of KV_DTYPES
    block_tokens: int
    total_blocks: int
    host_slots: int
    sends_fd: bool = False  # whether a descriptor of shared memory follows this command
    part_handle: str | None = None  # handle of this rank's part; without descriptor and handle, the rank allocates it


@dataclass(frozen=True, slots=True)
class AdapterToAdd(Order):
    """Command to read and add an adapter. Either all ranks or no ranks have the adapter afterwards."""

    name: str  # for error messages
    folder: str
    digest: str  # digest of the files that the leader read


@dataclass(frozen=True, slots=True)
class WeightsToRead(Order):
    """Command to read weights while steps continue. Either all ranks or no ranks have them after ADD_WEIGHTS."""

    folder: str  # folder of the checkpoint; empty: discard the weights that were read


@dataclass(frozen=True, slots=True)
class StepToMeasure(Order):
    """Command to measure the memory of the largest step, see engine/kv_cache/memory.py."""

    kv_dtype: str
    block_tokens: int
    tokens: int
    sequences: int
    longest: int  # maximum tokens of one sequence


class Closed(Exception):
    """Loss of the connection: the process at the other end closed it or ended."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    payload: bytes


def send(connection: socket.socket, kind: int, payload: bytes) -> None:
    """Send a frame. Raises: Closed."""
    try:
        connection.sendall(HEADER.pack(kind, len(payload)) + payload)
    except OSError as error:
        raise Closed(str(error)) from error


def send_fd(connection: socket.socket, fd: int) -> None:
    """Send a file descriptor. Raises: Closed."""
    try:
        socket.send_fds(connection, [b"\0"], [fd])
    except OSError as error:
        raise Closed(str(error)) from error


def receive_fd(connection: socket.socket) -> int:
    """Receive a file descriptor, which the caller closes. Raises: Closed."""
    try:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise Closed(str(error)) from error
    if not descriptors:
        raise Closed("no descriptor was sent")
    return descriptors[0]


def receive(connection: socket.socket) -> Frame:
    """Receive a frame within the socket's timeout. Raises: Closed, TimeoutError."""
    kind, size = HEADER.unpack(_exactly(connection, HEADER.size))
    return Frame(kind, _exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        try:
            part = connection.recv(min(1 << 20, size - len(received)))
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("end of stream")
        received += part
    return bytes(received)


def plan_bytes(plan: Plan) -> bytes:
    """Encode a plan's block moves and the tokens to compute, without samples: only the leader samples."""
    numbers = array("q", [len(plan.chunks), len(plan.copies), len(plan.swaps_out), len(plan.swaps_in)])
    for chunk in plan.chunks:
        numbers.extend((chunk.request_id, chunk.start, chunk.adapter, chunk.is_draft))
        numbers.extend((len(chunk.token_ids), len(chunk.block_table)))
        numbers.extend(chunk.token_ids)
        numbers.extend(chunk.block_table)
    for copy in plan.copies:
        numbers.extend((copy.source, copy.destination))
    for swap in (*plan.swaps_out, *plan.swaps_in):
        numbers.extend((swap.block, swap.host_slot))
    return numbers.tobytes()


def plan_of(payload: bytes) -> Plan:
    numbers = array("q")
    numbers.frombytes(payload)
    read = iter(numbers)
    chunks, copies, swaps_out, swaps_in = _take(read, 4)
    return Plan(
        chunks=tuple(_chunk(read) for _ in range(chunks)),
        copies=tuple(BlockCopy(*_take(read, 2)) for _ in range(copies)),
        swaps_out=tuple(BlockSwap(*_take(read, 2)) for _ in range(swaps_out)),
        swaps_in=tuple(BlockSwap(*_take(read, 2)) for _ in range(swaps_in)),
    )


def _chunk(read: Iterator[int]) -> Chunk:
    request_id, start, adapter, is_draft, tokens, blocks = _take(read, 6)
    token_ids, table = _take(read, tokens), _take(read, blocks)
    return Chunk(request_id, token_ids, start, table, adapter=adapter, is_draft=bool(is_draft))


def _take(read: Iterator[int], count: int) -> list[int]:
    return [next(read) for _ in range(count)]
