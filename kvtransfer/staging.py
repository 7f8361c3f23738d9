"""The receiver's own ring of memory, in which messages land before their blocks are put into place."""

from enum import Enum, auto

import torch


class _Slot(Enum):
    FREE = auto()
    AWAITED = auto()  # a receive is posted: bytes may appear at any time
    LANDED = auto()  # being copied to where it belongs


class StagingRing:
    """Slot `sequence % slots` holds message `sequence`. One thread; a call out of order is a bug: ValueError."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        self._memory = torch.zeros(slots, slot_bytes, dtype=torch.uint8, device=device)
        self._states = [_Slot.FREE] * slots

    def __len__(self) -> int:
        return len(self._states)

    def post(self, sequence: int) -> torch.Tensor:
        """The slot's memory, uint8 `[slot_bytes]`, to receive into; never one that is still being copied from."""
        self._turn(sequence, _Slot.FREE, _Slot.AWAITED)
        return self._memory[sequence % len(self)]

    def landed(self, sequence: int) -> None:
        self._turn(sequence, _Slot.AWAITED, _Slot.LANDED)

    def free(self, sequence: int) -> None:
        """It has no reader any more."""
        self._turn(sequence, _Slot.LANDED, _Slot.FREE)

    def _turn(self, sequence: int, wanted: _Slot, next_state: _Slot) -> None:
        slot = sequence % len(self)
        if self._states[slot] is not wanted:
            raise ValueError(f"message {sequence}: its slot is {self._states[slot].name}, not {wanted.name}")
        self._states[slot] = next_state
