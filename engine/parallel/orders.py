"""A leader's messages to a rank's process before there are plans: plain values, since they travel as JSON."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How the other ranks' processes run, and where they have their parts of the pool."""

    storage_fd: int | None = None  # of all ranks' parts, one after the other
    part_handles: tuple[str, ...] = ()  # of each rank's part, as `entry` opens it; neither: each has memory of its own
    entry: str = "baton.engine.parallel.rank_process"  # the module that such a process runs
    nice: int = 0  # how far they stand back behind other processes on their cores


@dataclass(frozen=True, slots=True)
class RankStart:
    """The values by which a rank loads its part of the model."""

    folder: str
    device: str  # of the leader; that of rank r is r places further, where devices have numbers
    dtype: str  # a key of DTYPES
    quantize: str
    degree: int
    cores: tuple[int, ...] | None  # of the whole worker
    entry: str
    nice: int
    rank: int = 0
    meeting: str = ""  # path where the ranks find each other

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_bytes(cls, payload: bytes) -> "RankStart":
        return cls(**json.loads(payload))


@dataclass(frozen=True, slots=True)
class RankPool:
    """Its part of the pool."""

    kv_dtype: str  # a key of KV_DTYPES
    block_tokens: int
    total_blocks: int
    host_slots: int
    sends_fd: bool = False  # of memory with all ranks' parts: it follows
    part_handle: str | None = None  # of this rank's part, as its module opens it; neither: memory of its own

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_bytes(cls, payload: bytes) -> "RankPool":
        return cls(**json.loads(payload))


@dataclass(frozen=True, slots=True)
class StepToMeasure:
    """The largest step that there will be, see engine/kv_cache/memory.py."""

    kv_dtype: str
    block_tokens: int
    tokens: int
    sequences: int
    longest: int  # tokens of one sequence

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_bytes(cls, payload: bytes) -> "StepToMeasure":
        return cls(**json.loads(payload))
