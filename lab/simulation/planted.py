"""Planted bugs, which a simulation must find: each patches production code during a run."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import baton.worker.transfer.reader
from baton.engine.kv_cache.block_pool import Watch
from baton.engine.kv_cache.block_table import BlockTable
from baton.engine.request import Chunk, Drawn, EndReason
from baton.engine.scheduler.batch import RunningBatch
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import ScheduledSequence, TokenMade
from baton.kvtransfer.tier.loader import TierLoader
from baton.kvtransfer.tier.staging import Staging
from baton.kvtransfer.tier.store import TierStore
from baton.lab.simulation.network.calls import current_process
from baton.process.registry.membership import Registration
from baton.router.fleet import wire as link_wire
from baton.router.fleet.fleet import WorkerLinks
from baton.router.request.answer import BestOf
from baton.worker.at_rest.sums import KnownSums
from baton.worker.tier.writer import Blocks, TierWriter
from baton.worker.transfer.reader import ConfirmedBlocks, Progress, TransferReader


def dropped_pin() -> AbstractContextManager[Any]:
    """Plant: release the blocks of a computed prompt before its reader has copied them, without an error."""
    real = RunningBatch.pin

    def pin(self: RunningBatch, prompt: ScheduledSequence) -> None:
        real(self, prompt)
        self.end(prompt)

    return patch.object(RunningBatch, "pin", pin)


def early_confirm() -> AbstractContextManager[Any]:
    """Plant: confirm a copy when its last blocks are offered, before they are copied."""
    copy_new, real, verdicts = TransferReader._copy_new, TransferReader._confirm, dict[bytes, bool]()

    async def copy(self: TransferReader, peer: Any, transfer_id: bytes, *more: Any) -> None:
        if more[-1].HasField("end"):
            verdicts[transfer_id] = await real(self, peer, transfer_id)
        await copy_new(self, peer, transfer_id, *more)

    async def confirm(self: TransferReader, peer: Any, transfer_id: bytes) -> bool:
        return verdicts.pop(transfer_id)

    return patch.multiple(TransferReader, _copy_new=copy, _confirm=confirm)


def doubled_adoption() -> AbstractContextManager[Any]:
    """Plant: send the command to adopt an answer twice."""
    real = WorkerLinks.adopt

    def adopt(self: WorkerLinks, *what: Any) -> None:
        real(self, *what)
        real(self, *what)

    return patch.object(WorkerLinks, "adopt", adopt)


def reused_transfer_id() -> AbstractContextManager[Any]:
    """Plant: use each transfer id for two attempts."""
    real, drawn = link_wire.Tag, dict[tuple[str, int], bytes]()

    def tag(**fields: Any) -> link_wire.Tag:
        pair = (current_process().name, fields["attempt_id"] // 2)
        return real(**{**fields, "transfer_id": drawn.setdefault(pair, fields["transfer_id"])})

    return patch.object(link_wire, "Tag", tag)


def off_by_one_offset() -> AbstractContextManager[Any]:
    """Plant: report the tokens of a continued answer one offset too low."""
    real = Scheduler._draw

    def draw(self: Scheduler, sequence: ScheduledSequence, drawn: Drawn) -> TokenMade:
        made = real(self, sequence, drawn)
        return made._replace(offset=made.offset - bool(sequence.request.answered_tokens))

    return patch.object(Scheduler, "_draw", draw)


def unseen_flip() -> AbstractContextManager[Any]:
    """Plant: do not compare the checksums of copied blocks with the source's."""

    async def check(self: TransferReader, *what: object) -> None:
        """Do nothing: accept every block."""

    return patch.object(TransferReader, "_check", check)


def announced_once() -> AbstractContextManager[Any]:
    """Plant: announce a worker in Redis only once, even after its record has expired."""
    real = Registration._step

    async def step(self: Registration) -> bool:
        return not await real(self)

    return patch.object(Registration, "_step", step)


def best_by_sum() -> AbstractContextManager[Any]:
    """Plant: return the choices with the highest sum of log-probabilities, not the highest mean: short choices win."""

    def summed(self: BestOf, index: int) -> float:
        return sum(token.logprob for delta in self._deltas.get(index, ()) for token in delta.logprobs)

    return patch.object(BestOf, "_mean_logprob", summed)


def kept_unconfirmed() -> AbstractContextManager[Any]:
    """Plant: treat the blocks that the source has announced as confirmed, without asking it."""

    async def confirm(
        stub: object, transfer_id: bytes, progress: Progress, confirmed: ConfirmedBlocks, period_s: float
    ) -> None:
        while True:
            await asyncio.sleep(period_s)
            confirmed.blocks = len(progress.source_blocks)

    return patch.object(baton.worker.transfer.reader, "keep_confirming", confirm)


def kept_draft() -> AbstractContextManager[Any]:
    """Plant: accept the first drafted token that differs from the sampled one."""

    def draws(self: ScheduledSequence, chunk: Chunk) -> bool:
        return not chunk.is_draft or chunk.end == len(self.token_ids)

    return patch.object(ScheduledSequence, "draws", draws)


def published_draft() -> AbstractContextManager[Any]:
    """Plant: publish an answer's last block although the KV of the last token is missing or belongs to a draft."""
    real = Scheduler._append

    def append(self: Scheduler, sequence: ScheduledSequence, token_id: int, end: EndReason | None) -> None:
        if end is not None and sequence.drafts is not None and sequence.hashes is not None:
            tokens = [*sequence.token_ids, token_id]
            blocks = min(len(tokens) // self._block_tokens, len(sequence.held().blocks))
            sequence.held().publish(sequence.hashes.first(blocks, tokens))
        real(self, sequence, token_id, end)

    return patch.object(Scheduler, "_append", append)


def unseen_damage() -> AbstractContextManager[Any]:
    """Plant: accept blocks from files without checking their checksums."""

    def verify(self: TierStore, names: Sequence[bytes], staging: Staging) -> int:
        self.counters.loaded_blocks += len(names)
        return len(names)

    return patch.object(TierStore, "verify", verify)


def wrong_place() -> AbstractContextManager[Any]:
    """Plant: load each block from files into the pool block of another."""
    real = TierLoader.load

    def load(self: TierLoader, names: Sequence[bytes], blocks: Sequence[int], *more: Any) -> int:
        return real(self, names, [*blocks[1:], *blocks[:1]], *more)

    return patch.object(TierLoader, "load", load)


def stale_copy() -> AbstractContextManager[Any]:
    """Plant: write a block to files although the block had changed owners before its data was copied."""
    real = TierWriter._store_watched

    def store(self: TierWriter, blocks: Blocks, names: Sequence[bytes], watches: Sequence[Watch]) -> bool:
        for watch in watches:
            watch.broken = False
        return real(self, blocks, names, watches)

    return patch.object(TierWriter, "_store_watched", store)


def unseen_change() -> AbstractContextManager[Any]:
    """Plant: accept cached blocks although their checksums have changed."""
    return patch.object(KnownSums, "matches", lambda self, name, checksum: True)


def all_taken() -> AbstractContextManager[Any]:
    """Plant: take all blocks of a prompt at its admission."""
    real = RunningBatch.admit

    def admit(self: RunningBatch, sequence: ScheduledSequence, most_slots: int, beside: int, takes_all: bool) -> Any:
        return real(self, sequence, most_slots, beside, takes_all=True)

    return patch.object(RunningBatch, "admit", admit)


def passed_over() -> AbstractContextManager[Any]:
    """Plant: give the oldest prompt no blocks while another prompt runs."""
    real = RunningBatch.grow

    def grow(self: RunningBatch, prompt: ScheduledSequence, *more: Any) -> int:
        first, *others = [each for each in self.running if each.is_prompt]
        return 0 if others and prompt is first else real(self, prompt, *more)

    return patch.object(RunningBatch, "grow", grow)


def granted_twice() -> AbstractContextManager[Any]:
    """Plant: allocate a block that a prompt already holds."""
    real = BlockTable.append

    def append(self: BlockTable, columns: int) -> None:
        held = self.blocks
        real(self, columns)
        if held and columns:
            self._replace((*self.blocks[:-1], held[0]))

    return patch.object(BlockTable, "append", append)


PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "doubled-adoption": doubled_adoption,
    "dropped-pin": dropped_pin,
    "early-confirm": early_confirm,
    "reused-transfer-id": reused_transfer_id,
    "off-by-one-offset": off_by_one_offset,
    "unseen-flip": unseen_flip,
    "announced-once": announced_once,
    "best-by-sum": best_by_sum,
    "kept-unconfirmed": kept_unconfirmed,
    "kept-draft": kept_draft,
    "published-draft": published_draft,
    "unseen-damage": unseen_damage,
    "unseen-change": unseen_change,
    "wrong-place": wrong_place,
    "stale-copy": stale_copy,
    "all-taken": all_taken,
    "passed-over": passed_over,
    "granted-twice": granted_twice,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the bug `name` inside the block; None plants nothing."""
    with PLANTS[name]() if name is not None else nullcontext():
        yield
