"""The charges of this router's attempts on one worker. Pure; sums are kept, as every decision asks for them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Charge:
    """The resources that one attempt takes on one worker."""

    tokens: int
    blocks: int = 0
    slots: int = 0
    prompt_tokens: int = 0  # of a decode worker: tokens of the prompt that it still has to compute


class Charges:
    """By attempt id."""

    __slots__ = ("_charges", "blocks", "prompt_tokens", "slots", "tokens")

    def __init__(self) -> None:
        self._charges: dict[int, Charge] = {}
        self.tokens = self.blocks = self.slots = self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._charges)

    def __iter__(self) -> Iterator[int]:
        return iter(self._charges)

    def add(self, attempt_id: int, charge: Charge) -> None:
        """Replaces its earlier charge."""
        self.give_back(attempt_id)
        self._charges[attempt_id] = charge
        self.tokens += charge.tokens
        self.blocks += charge.blocks
        self.slots += charge.slots
        self.prompt_tokens += charge.prompt_tokens

    def prompt_computed(self, attempt_id: int) -> None:
        """The rest of its charge stays, if it has not been given back."""
        charge = self._charges.get(attempt_id)
        if charge is not None:
            self._charges[attempt_id] = replace(charge, prompt_tokens=0)
            self.prompt_tokens -= charge.prompt_tokens

    def give_back(self, attempt_id: int) -> None:
        """It may have been given back before."""
        charge = self._charges.pop(attempt_id, None)
        if charge is not None:
            self.tokens -= charge.tokens
            self.blocks -= charge.blocks
            self.slots -= charge.slots
            self.prompt_tokens -= charge.prompt_tokens

    def clear(self) -> None:
        for attempt_id in tuple(self._charges):
            self.give_back(attempt_id)
