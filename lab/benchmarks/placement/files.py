"""The disk tier of simulated workers: written when a prompt has been computed, read by all workers of a directory.

Each worker's files are bounded and drop the oldest 1/64 at a time, like the real tier (kvtransfer/tier/store.py). A
block that one worker of a directory has written is not written again by another.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.lab.benchmarks.placement.traces import BLOCK_TOKENS
from baton.text.kv_loading import LoadCosts

SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class FileOptions:
    blocks_per_worker: int
    workers_per_directory: int
    load_gb_per_s: float
    known: bool  # the placement knows the blocks in files; workers load them in any case


class Directory:
    """KV blocks in the files of one machine, which all its workers can load."""

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def behind(self, blocks: Sequence[bytes], hit_blocks: int) -> int:
        """Return how many consecutive blocks of a prompt are in files, starting after the hits."""
        known = self._blocks
        end = next((place for place in range(hit_blocks, len(blocks)) if blocks[place] not in known), len(blocks))
        return end - hit_blocks

    def add(self, block: bytes) -> None:
        self._blocks.add(block)

    def remove(self, blocks: Sequence[bytes]) -> None:
        self._blocks.difference_update(blocks)


class SimulatedFiles:
    """Bounded KV files of one worker; if they are full, the oldest segment is dropped."""

    def __init__(self, directory: Directory, blocks: int) -> None:
        self.directory = directory
        self._segment_blocks = max(1, blocks // SEGMENTS)
        self._segments: deque[list[bytes]] = deque([[]])
        self._most_segments = max(1, blocks // self._segment_blocks)

    def write(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            if block in self.directory:
                continue
            if len(self._segments[-1]) == self._segment_blocks:
                if len(self._segments) == self._most_segments:
                    self.directory.remove(self._segments.popleft())
                self._segments.append([])
            self._segments[-1].append(block)
            self.directory.add(block)


def load_costs(prefill_tokens_per_s: float, kv_bytes_per_token: float, load_gb_per_s: float) -> LoadCosts:
    block_bytes = round(BLOCK_TOKENS * kv_bytes_per_token)
    return LoadCosts(BLOCK_TOKENS, block_bytes, prefill_tokens_per_s, 1e9 * load_gb_per_s)
