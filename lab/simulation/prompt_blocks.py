"""Invariants of prompts that take blocks chunk by chunk, checked in every plan of a scheduler."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from baton.engine.request import Plan, blocks_for
from baton.engine.scheduler.batch import RunningBatch, headroom_blocks
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import ScheduledSequence


class PromptBlocks:
    """Checks of the plans of all schedulers."""

    def __init__(self) -> None:
        self.fault: str | None = None  # first violation
        self._denied: list[ScheduledSequence] = []  # prompts that took no block in the current plan
        self._waiting: dict[int, ScheduledSequence] = {}  # by scheduler: oldest prompt denied in its last plan

    @contextmanager
    def watching(self, scheduler: type[Any] = Scheduler, batch: type[Any] = RunningBatch) -> Iterator[None]:
        """Check every plan of schedulers of this class inside the block."""
        plan, grow = scheduler.plan, batch.grow

        def checked_plan(self_: Scheduler, now_s: float = 0.0) -> Plan | None:
            self._denied.clear()
            made: Plan | None = plan(self_, now_s)
            self.fault = self.fault or owner_fault(self_.batch) or column_fault(self_) or self._waits(self_)
            return made

        def checked_grow(self_: RunningBatch, prompt: ScheduledSequence, *more: Any) -> int:
            tokens: int = grow(self_, prompt, *more)
            if tokens == 0:
                self._denied.append(prompt)
                self.fault = self.fault or denial_fault(self_, prompt)
            return tokens

        with patch.object(scheduler, "plan", checked_plan), patch.object(batch, "grow", checked_grow):
            yield

    def _waits(self, scheduler: Scheduler) -> str | None:
        """Check that younger sequences released blocks for the oldest prompt that was denied in the last plan."""
        batch, newest = scheduler.batch, scheduler.batch.newest_preemptible()
        computed = {id(each) for each in batch.in_flight.latest.sequences} if batch.in_flight else set()
        denied = [each for each in self._denied if each in batch.running and id(each) not in computed]
        oldest = min((each for each in denied if not each.request.prefill_only), key=_age, default=None)
        before = self._waiting.pop(id(scheduler), None)
        if oldest is None or newest is None:
            return None
        self._waiting[id(scheduler)] = oldest
        if before is oldest and newest.arrival_key > oldest.arrival_key:
            return "two plans left the oldest prompt without blocks, and a younger sequence kept its own"
        return None


def owner_fault(batch: RunningBatch) -> str | None:
    """Describe a block with more owners than references; None if there is none."""
    sequences = [*batch.running, *batch.reserved.values(), *batch.pinned.values()]
    owners = Counter(block for each in sequences for block in each.held().held_blocks)
    shared = next((block for block, count in owners.items() if count > batch.pool.references(block)), None)
    return None if shared is None else f"block {shared} has more owners than references"


def column_fault(scheduler: Scheduler) -> str | None:
    """Describe a prompt that holds more columns than its computed tokens and a step need; None if there is none."""
    block_tokens, most_tokens = int(scheduler.settings["block_tokens"]), scheduler.max_step_tokens
    for each in scheduler.batch.running:
        columns = each.held().columns
        if each.is_prompt and columns > blocks_for(each.computed_tokens + most_tokens, block_tokens):
            return f"a prompt with {each.computed_tokens} tokens of KV holds {columns} columns: more than a step needs"
    return None


def denial_fault(batch: RunningBatch, prompt: ScheduledSequence) -> str | None:
    """Describe that a prompt took no blocks although those it needs are available; None if they are not."""
    pool = batch.pool
    growing = sum(not each.request.prefill_only for each in batch.running if each is not prompt)
    spare = pool.available - pool.groups.blocks(headroom_blocks(growing + len(batch.reserved)))
    needed = batch.lacking_blocks(prompt) if prompt.request.prefill_only else pool.column_blocks
    return f"a prompt took no blocks; it needs {needed} of {spare} spare ones" if needed <= spare else None


def _age(sequence: ScheduledSequence) -> Any:
    return sequence.arrival_key
