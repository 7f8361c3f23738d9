"""Host memory for the KV of preempted sequences: slot numbers, not memory."""

from baton.engine.kv_cache.block_pool import BlockError


class SwapSpace:
    """Pool of `total_slots` host slots of one KV block each, with ids [0, total_slots)."""

    def __init__(self, total_slots: int) -> None:
        self.total_slots = total_slots
        self._free = list(range(total_slots - 1, -1, -1))

    def take(self, count: int) -> "SwapSlots | None":
        """Return `count` slots, all or none."""
        if count > len(self._free):
            return None
        return SwapSlots(self, tuple(self._free.pop() for _ in range(count)))

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Release slots. Only SwapSlots calls it, once for its slots."""
        self._free.extend(reversed(slots))


class SwapSlots:
    """Slots that store the first blocks of one sequence, in order; released exactly once."""

    def __init__(self, space: SwapSpace, slots: tuple[int, ...]) -> None:
        self._space = space
        self._slots = slots
        self._released = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Slot ids. Raises: BlockError after the release, when the slots may have other owners."""
        if self._released:
            raise BlockError("the swap slots were already released")
        return self._slots

    def release(self) -> None:
        """Release the slots. Raises: BlockError the second time."""
        slots = self.slots
        self._released = True
        self._space.give_back(slots)
