"""A plan while it is being made."""

from dataclasses import dataclass, field

from engine.mixed_state import MixedSequence, following_chunk, next_chunk
from engine.plan import BlockCopy, BlockSwap, Chunk, Plan


@dataclass(slots=True)
class Draft:
    sequences: list[MixedSequence] = field(default_factory=list)  # parallel to `chunks`
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swaps_out: list[BlockSwap] = field(default_factory=list)
    swaps_in: list[BlockSwap] = field(default_factory=list)

    def compute(self, sequence: MixedSequence, budget_tokens: int) -> int:
        """Adds the next tokens of a sequence, at most so many. Returns how many they are."""
        chunk = next_chunk(sequence, budget_tokens)
        self.sequences.append(sequence)
        self.chunks.append(chunk)
        return len(chunk.token_ids)

    def follow(self, sequence: MixedSequence, place: int) -> None:
        """Adds the token that the chunk at `place` of the step before is going to draw."""
        self.sequences.append(sequence)
        self.chunks.append(following_chunk(sequence, place))

    def copy(self, copy: BlockCopy | None) -> None:
        if copy is not None:
            self.copies.append(copy)

    def finish(self) -> Plan | None:
        """None where there is nothing to do. Sequences that swap in are computed too, so that is no case of its own."""
        if not self.chunks and not self.swaps_out:
            return None
        return Plan(tuple(self.chunks), tuple(self.copies), tuple(self.swaps_out), tuple(self.swaps_in))
