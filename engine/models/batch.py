"""Chunks of a plan as tensors, and the interface of models, which compute such batches.

Single-token chunks come first, so that decode attention is one launch; rows with an adapter are contiguous.
"""

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from baton.engine.config.model_config import ModelConfig
from baton.engine.request import Chunk
from baton.kernels.types import DecodeRows, GroupRows, KvPages, PagedRows, PrefillChunks, PrefillRows

ALIGNED_BYTES = 16
"""Alignment of every tensor that a kernel reads: Triton compiles another kernel for less aligned pointers."""

DTYPES = {"q": torch.int64, "d": torch.float64, "f": torch.float32}  # dtypes by the array's type code


def to_device(arrays: Sequence[array], device: torch.device) -> list[torch.Tensor]:  # type: ignore[type-arg]
    """Copy arrays to the device in one transfer; each begins at a multiple of ALIGNED_BYTES."""
    whole = packed(arrays, device)
    return parts_of(whole if whole.device == device else whole.to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[array], device: torch.device) -> torch.Tensor:  # type: ignore[type-arg]
    """Concatenate arrays as uint8 on the host, for copying to `device`.

    For a GPU the result is in pinned memory, which PyTorch's allocator does not reuse before the copy is finished.
    """
    whole = bytearray()
    for each in arrays:
        whole += memoryview(each).cast("B")
        whole += bytes(-len(whole) % ALIGNED_BYTES)
    on_host = torch.frombuffer(whole, dtype=torch.uint8)
    return on_host.pin_memory() if device.type == "cuda" else on_host


def parts_of(whole: torch.Tensor, arrays: Sequence[array]) -> list[torch.Tensor]:  # type: ignore[type-arg]
    """Return views of `whole`, laid out as by `packed`, one per array. Only the arrays' types and lengths matter."""
    parts, begin = [], 0
    for each in arrays:
        size = len(each) * each.itemsize
        parts.append(whole[begin : begin + size].view(DTYPES[each.typecode]))
        begin += size + -size % ALIGNED_BYTES
    return parts


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a batch that have an adapter, contiguous by `batch_order`."""

    rows: slice
    adapters: torch.Tensor  # int64 [rows.stop - rows.start], adapter number of each row, at least 1
    lowest: int  # smallest number in `adapters`
    highest: int

    @classmethod
    def of(cls, rows: slice, numbers: Sequence[int], adapters: torch.Tensor) -> "AdapterRows | None":
        """Return the rows, or None if none has an adapter. `numbers`: host copy of `adapters`."""
        return cls(rows, adapters, min(numbers), max(numbers)) if numbers else None


def batch_order(is_long: bool, adapter: int) -> tuple[bool, int]:
    """Return the sort key of a chunk: single tokens first, and rows with an adapter contiguous.

    Single-token chunks are sorted by ascending adapter number (0: none), longer ones by descending number.
    """
    return is_long, -adapter if is_long else adapter


def adapter_run(adapters: Sequence[int]) -> slice:
    """Return the rows with an adapter. `adapters`: adapter number of each row (0: none), sorted by `batch_order`."""
    rows = [index for index, adapter in enumerate(adapters) if adapter]
    if not rows:
        return slice(0, 0)
    if rows[-1] + 1 - rows[0] != len(rows):
        raise ValueError("rows with an adapter are not contiguous: sort chunks by batch_order")
    return slice(rows[0], rows[-1] + 1)


@dataclass(frozen=True, slots=True)
class Batch(PagedRows):
    chunk_rows: tuple[slice, ...]  # rows of each chunk, in the order of the plan
    adapters: AdapterRows | None = None  # None if no row has an adapter
    drafts: bool = False  # whether a row of `decode` reads KV that another row writes in the same step
    second_rows: tuple[slice, ...] = ()  # rows of the second text of each pair
    on_layers_start: Callable[[], None] = lambda: None
    """Function that a model calls once, when its layers start, so that other threads can do Python work."""


def make_batch(
    chunks: Sequence[Chunk],
    block_tokens: int,
    device: torch.device,
    on_layers_start: Callable[[], None] = lambda: None,
    by_library: Callable[[Chunk], bool] = lambda chunk: False,
    groups: int = 1,
) -> Batch:
    """Build the batch of a plan's chunks.

    `by_library`: returns whether a library computes a long chunk's attention; such chunks come last. `groups`: number
    of layer groups, each with its own blocks. Raises ValueError for a chunk without tokens or with too short a table.
    """
    for chunk in chunks:
        _check_blocks(chunk, block_tokens, groups)
    is_long = [len(chunk.token_ids) > 1 for chunk in chunks]
    others = [long and by_library(chunk) for long, chunk in zip(is_long, chunks, strict=True)]
    order = sorted(
        range(len(chunks)), key=lambda index: (batch_order(is_long[index], chunks[index].adapter), others[index])
    )
    chunk_rows = [slice(0, 0)] * len(chunks)
    numbers, single = BatchNumbers(groups), len(chunks) - sum(is_long)
    numbers.add_single([chunks[index] for index in order[:single]], block_tokens)
    for row, index in enumerate(order[:single]):
        chunk_rows[index] = slice(row, row + 1)
    for index in order[single:]:
        chunk_rows[index] = numbers.add(chunks[index], block_tokens)
    adapted = adapter_run(numbers.adapters)
    chosen = numbers.adapters[adapted]
    row_starts = array("q", [0, *itertools.accumulate(len(chunks[index].token_ids) for index in order[single:])])
    token_ids, positions, ends, block_ids, prefill_starts, chosen_ids, *of_groups = numbers.tensors(
        device, row_starts, chosen
    )
    last = itertools.takewhile(lambda index: others[index], reversed(order[single:]))
    libraries = sum(1 for _ in last)

    def group_rows(group: int) -> GroupRows:
        slots, block_starts = of_groups[2 * group : 2 * group + 2]
        starts, decode, prefills = numbers.starts_of(group), None, None
        if single:
            decode = DecodeRows(block_ids[: starts[single]], block_starts[: single + 1], ends[:single])
        if single < len(chunks):
            long = tuple(
                PrefillRows(chunk_rows[index], chunks[index].start, block_ids[starts[place] : starts[place + 1]])
                for place, index in enumerate(order[single:], start=single)
            )
            prefills = PrefillChunks(long, prefill_starts, ends[single:], block_ids, block_starts[single:], libraries)
        return GroupRows(slots, decode, prefills)

    return Batch(
        token_ids=token_ids,
        positions=positions,
        groups=tuple(map(group_rows, range(groups))),
        chunk_rows=tuple(chunk_rows),
        adapters=AdapterRows.of(adapted, chosen, chosen_ids),
        drafts=any(chunk.is_draft for chunk in chunks),
        second_rows=tuple(_second_rows(chunks, chunk_rows)),
        on_layers_start=on_layers_start,
    )


def _check_blocks(chunk: Chunk, block_tokens: int, groups: int) -> None:
    blocks = len(chunk.block_table)
    if not chunk.token_ids or blocks // groups * block_tokens < chunk.end:
        raise ValueError(
            f"request {chunk.request_id}: {blocks} blocks do not fit positions {chunk.start} to {chunk.end}"
        )


def _second_rows(chunks: Sequence[Chunk], chunk_rows: Sequence[slice]) -> Iterator[slice]:
    for chunk, rows in zip(chunks, chunk_rows, strict=True):
        if chunk.pooled is not None and chunk.pooled.second_from is not None:
            yield slice(rows.start + chunk.pooled.second_from, rows.stop)


class BatchNumbers:
    """Integers of a batch, copied to the device together.

    Block tables of all sequences are concatenated, group after group; tables of all groups have equal length.
    """

    def __init__(self, groups: int = 1) -> None:
        self.token_ids, self.positions, self.ends = array("q"), array("q"), array("q")
        self.adapters = array("q")  # adapter number of each row
        self.slots = [array("q") for _ in range(groups)]  # one array per group
        self.block_starts = array("q", [0])  # start of each table among the block ids of a group
        self._block_ids = [array("q") for _ in range(groups)]

    def add_single(self, chunks: Sequence[Chunk], block_tokens: int) -> None:
        """Add chunks of one token each, column by column: decode, the most frequent case."""
        starts, groups = [chunk.start for chunk in chunks], len(self.slots)
        columns = [start // block_tokens for start in starts]
        self.token_ids.extend([chunk.token_ids[0] for chunk in chunks])
        self.positions.extend(starts)
        self.ends.extend([start + 1 for start in starts])
        self.adapters.extend([chunk.adapter for chunk in chunks])
        for group, (slots, block_ids) in enumerate(zip(self.slots, self._block_ids, strict=True)):
            tables = [chunk.block_table if groups == 1 else chunk.block_table[group::groups] for chunk in chunks]
            for table, column, start in zip(tables, columns, starts, strict=True):
                slots.append(table[column] * block_tokens + start % block_tokens)
                block_ids.extend(table[: column + 1])
        begin = self.block_starts.pop()
        self.block_starts.extend(itertools.accumulate([column + 1 for column in columns], initial=begin))

    def add(self, chunk: Chunk, block_tokens: int) -> slice:
        """Add a chunk, and return its rows in the batch."""
        first, groups, end = len(self.token_ids), len(self.slots), chunk.end
        blocks = -(-end // block_tokens)
        self.token_ids.extend(chunk.token_ids)
        self.positions.extend(range(chunk.start, end))
        self.adapters.extend(itertools.repeat(chunk.adapter, end - chunk.start))
        for group, (slots, block_ids) in enumerate(zip(self.slots, self._block_ids, strict=True)):
            table = chunk.block_table if groups == 1 else chunk.block_table[group::groups]
            _add_slots(slots, chunk, table, block_tokens)
            block_ids.extend(table[:blocks])
        self.block_starts.append(self.block_starts[-1] + blocks)
        self.ends.append(end)
        return slice(first, len(self.token_ids))

    @property
    def block_ids(self) -> "array[int]":
        first, *others = self._block_ids
        return sum(others, first) if others else first

    def starts_of(self, group: int) -> "array[int]":
        """Return the start of each table of a group in `block_ids`, and the end of the last one."""
        before = group * self.block_starts[-1]
        return array("q", [before + start for start in self.block_starts]) if before else self.block_starts

    def tensors(self, device: torch.device, *others: "array[int]") -> tuple[torch.Tensor, ...]:
        """Return token_ids, positions, ends, block_ids and `others` as tensors, then slots and starts of each group."""
        of_groups = ((slots, self.starts_of(group)) for group, slots in enumerate(self.slots))
        parts = (self.token_ids, self.positions, self.ends, self.block_ids, *others)
        return tuple(to_device((*parts, *itertools.chain.from_iterable(of_groups)), device))


def _add_slots(slots: "array[int]", chunk: Chunk, table: Sequence[int], block_tokens: int) -> None:
    for logical in range(chunk.start // block_tokens, -(-chunk.end // block_tokens)):
        begins = logical * block_tokens  # position of the block's first token
        offset = table[logical] * block_tokens - begins
        slots.extend(range(max(chunk.start, begins) + offset, min(chunk.end, begins + block_tokens) + offset))


class Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""

    @property
    def device(self) -> torch.device: ...

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Compute the residual stream after the last layer, `[tokens, hidden]`, one row per token of `batch`, in order.

        Writes the KV of these tokens into the pool `kv`, reads that of preceding tokens, and calls
        `batch.on_layers_start` once before the layers.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits `[rows, vocab]` of any rows of `hidden()`."""

    def normal(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 `[rows, hidden]`: rows of `hidden()` after the last norm, as the head reads them."""


class Rotation(NamedTuple):
    """Cosines and sines in the model's dtype, `[tables, angles, pairs]`; without the first dimension for one table."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None = None  # int64 [tokens], index of each token's angles; None: angle i is token i's

    def table(self, index: int) -> "Rotation":
        return Rotation(self.cos[index], self.sin[index], self.rows)

    def of_tokens(self) -> "Rotation":
        """Return the angles in the order of the tokens. Only for a single table."""
        return self if self.rows is None else Rotation(self.cos[self.rows], self.sin[self.rows])


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings of all layers: one table per distinct rotation."""

    frequencies: torch.Tensor  # float32 [tables, pairs], radians per position
    magnitudes: torch.Tensor | None  # float32 [tables, 1, 1], scale of cosines and sines; None: 1

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation at each position. Angles are float32: bfloat16 cannot represent position 257."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        if self.magnitudes is not None:
            cos, sin = cos * self.magnitudes, sin * self.magnitudes
        return Rotation(cos.to(dtype), sin.to(dtype))
