"""How the tier of a worker stands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierState:
    """As it is reported. Blocks and bytes since the start, but for `blocks` and `size_bytes`."""

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
