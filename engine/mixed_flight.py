"""Steps that are planned and not committed yet, and the sequences that ended while such a step still writes their KV.

Pure. No other sequence may get their blocks before that step is done.
"""

from collections import deque
from collections.abc import Sequence

from engine.mixed_state import MixedSequence


class Flights:
    def __init__(self) -> None:
        self._steps: deque[tuple[MixedSequence, ...]] = deque()
        self._ended: list[MixedSequence] = []  # hold their blocks until `finish` has no step with them left

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._steps)

    @property
    def ended(self) -> Sequence[MixedSequence]:
        return self._ended

    @property
    def latest(self) -> tuple[MixedSequence, ...]:
        """Sequences of the step planned last, in the order of its chunks."""
        return self._steps[-1]

    def begin(self, sequences: Sequence[MixedSequence]) -> None:
        self._steps.append(tuple(sequences))

    def finish(self) -> tuple[MixedSequence, ...]:
        """The oldest step is done: its sequences, after giving back the blocks that were only kept for it."""
        done = self._steps.popleft()
        kept = [sequence for sequence in self._ended if self._writes(sequence)]
        for sequence in self._ended:
            if sequence not in kept:
                sequence.release()
        self._ended = kept
        return done

    def end(self, sequence: MixedSequence) -> None:
        """Gives back an ended sequence's blocks, now or when nothing writes to them any more."""
        if self._writes(sequence):
            self._ended.append(sequence)
        else:
            sequence.release()

    def _writes(self, sequence: MixedSequence) -> bool:
        return any(sequence in step for step in self._steps)
