"""The state of one pull: how far it is, which blocks are certain, and how it can fail. Knows no source and no copying.

A block is certain once the source has confirmed, after it had landed, that it was pinned throughout. That stays true
even if the source is lost, so that another attempt at the same prompt need not pull it again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from engine.sequence import FirstToken
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc

CONFIRM_TIMEOUT_S = 2.0


class TransferFailed(Exception):
    """The KV could not be read, or the blocks read may not be used."""


class BlocksCorrupt(TransferFailed):
    """A checksum differs: the bytes read are not those that the source had. The source has been notified."""


class PoolReplaced(TransferFailed):
    """The process that we paired with is gone and another has its address: the mapped memory is not its pool."""


class SourceLost(TransferFailed):
    """The source does not answer any more. The blocks that it confirmed stay certain."""


class Destination(Protocol):
    """Pages of our own for the blocks of a transfer."""

    @property
    def blocks(self) -> Sequence[int]:
        """In logical order. Only the pull writes them, and none reads those that are pulled before it has ended."""

    @property
    def cached_blocks(self) -> int:
        """The first so many have their KV already: they are left alone."""


@dataclass(frozen=True, slots=True)
class Pull:
    """The blocks that have landed, validated."""

    first_tokens: tuple[FirstToken, ...]  # none of blocks that were asked for by hash
    blocks: int  # how many the source had; those of the destination up to there have their KV
    bytes: int
    copy_ms: float
    exposed_ms: float  # from the first token's sampling, or the Open if that was later, to the validated end
    late_ms: float  # from the first token's sampling to the Open: the request was waiting for pages
    transport: str


@dataclass(slots=True)
class Certain:
    """Of a pull that has not ended well: the first so many blocks of its destination may be used all the same."""

    blocks: int = 0


@dataclass(slots=True)
class Progress:
    """The progress of one pull: blocks seen and copied so far."""

    opened: float  # monotonic seconds

    source_blocks: list[int] = field(default_factory=list)  # physical, in logical order
    landed_blocks: int = 0  # of those, copied, and their checksums compared where they came with any
    copied_bytes: int = 0
    copy_s: float = 0.0
    last_watermark: float = 0.0  # when it arrived, monotonic seconds
    round_trip_s: float = 0.0  # of the call that confirmed the copy
    last_age_s: float = 0.0  # how long the first token had been there when the last watermark was sent

    def timings_ms(self, validated: float) -> tuple[float, float]:
        """(exposed, late). The time that the first token waited before the Open is not the transfer's.

        The last watermark's own way here cannot be timed across two clocks: it is taken as half of a round trip.
        """
        late_s = max(0.0, self.last_age_s - (self.last_watermark - self.opened))
        exposed_s = validated - self.last_watermark + self.last_age_s - late_s + self.round_trip_s / 2
        return exposed_s * 1e3, late_s * 1e3


async def keep_confirming(
    stub: kv_transfer_pb2_grpc.KvTransferServiceStub,
    transfer_id: bytes,
    progress: Progress,
    certain: Certain,
    period_s: float,
) -> None:
    """Has the source confirm the landed blocks, each `period_s`, until cancelled or until the source denies it.

    A pull that ends sooner costs no call: its end is confirmed by the call that closes it. Copies continue
    meanwhile, but blocks that land after the call was sent are not in the answer.
    """
    request = kv_transfer_pb2.ConfirmRequest(transfer_id=transfer_id)
    while True:
        await asyncio.sleep(period_s)
        landed_blocks = progress.landed_blocks
        if landed_blocks <= certain.blocks:
            continue
        try:
            response = await stub.Confirm(request, timeout=CONFIRM_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # the pull itself finds the error
        if not response.pinned:
            return
        certain.blocks = landed_blocks
