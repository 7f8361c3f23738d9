"""State of a worker's tier."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierState:
    """Reported state. Blocks and bytes since the start, except `blocks` and `size_bytes`."""

    blocks: int  # that can be found, others' included
    size_bytes: int  # of this worker's files
    reads: bool
    writes: bool
    queried_blocks: int
    hit_blocks: int
    corrupt_blocks: int
    loaded_bytes: int
    stored_bytes: int
    dropped_blocks: int
    evicted_blocks: int
    directory_id: bytes = b""  # workers with the same one read each other's files; empty: not open
    load_bytes_per_s: float = 0.0  # 0: not measured
    block_bytes: int = 0
    memory_blocks: int = 0  # in host memory before the files
    memory_bytes: int = 0
    sequence: int = 0  # of what it announced of its own files
