"""Host memory for the KV of preempted sequences: slot numbers, not memory."""

from baton.engine.kv_cache.block_pool import BlockError


class SwapSpace:
    """`total_slots` slots of host memory, of one KV block each, with ids [0, total_slots): for preempted sequences."""

    def __init__(self, total_slots: int) -> None:
        self.total_slots = total_slots
        self._free = list(range(total_slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, count: int) -> "SwapSlots | None":
        """`count` slots, all or none."""
        if count > len(self._free):
            return None
        return SwapSlots(self, tuple(self._free.pop() for _ in range(count)))

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Only for SwapSlots, which does it once."""
        self._free.extend(reversed(slots))


class SwapSlots:
    """Slots that hold the first blocks of one sequence, in order: a value that is released exactly once."""

    def __init__(self, space: SwapSpace, slots: tuple[int, ...]) -> None:
        self._space = space
        self._slots = slots
        self._released = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Raises: BlockError after the release, since the slots may be someone else's by then."""
        if self._released:
            raise BlockError("the swap slots were released")
        return self._slots

    def release(self) -> None:
        """Raises: BlockError the second time."""
        slots = self.slots
        self._released = True
        self._space.give_back(slots)
