"""Arguments and results of kernels: layers of the KV pool, scoring, weights, drawn rows; and their checks."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

import torch


class Gate(IntEnum):
    """Gate function of a feed-forward layer; as in kernels/native/linear.h."""

    SILU = 1
    GELU = 2  # its approximation with a hyperbolic tangent
    CLAMPED = 3  # SiLU of a gate bounded by SWIGLU_LIMIT, faster by SWIGLU_ALPHA; one is added to the bounded factor
    SIGMOID = 4


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of CLAMPED; as in kernels/native/layer.h


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Check a shape; `None` stands for any size."""
    actual = tensor.shape
    if len(actual) != len(shape) or any(want not in (None, size) for want, size in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(actual)}")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_norm(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Check the norm's weight for rows of `x`: of its dtype, or float32."""
    check_shape(name, weight, x.shape[-1])
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name} must be {x.dtype} or torch.float32, got {weight.dtype}")


def check_angles(cos: torch.Tensor, sin: torch.Tensor, rows: int, x: torch.Tensor) -> None:
    """Check angles `[rows, pairs]`: one for each rotated pair of numbers of a head of `x`, `[tokens, heads,
    head_dim]`.
    """
    check_shape("cos", cos, rows, None)
    check_shape("sin", sin, *cos.shape)
    if cos.shape[1] > x.shape[2] // 2:
        raise ValueError(f"cos must be [{rows}, at most {x.shape[2] // 2}], got {list(cos.shape)}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, x.dtype)


def check_index(name: str, tensor: torch.Tensor, length: int | None = None) -> None:
    """Check an index: int64, since an offset into a pool of pages passes 2**31 elements early; one dimension."""
    check_shape(name, tensor, length)
    check_dtype(name, tensor, torch.int64)


QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # what is stored with scales


@dataclass(frozen=True, slots=True)
class _KvHeads:
    data: torch.Tensor  # [..., 2 (keys, values), kv_heads, block_tokens, head_dim]
    scales: torch.Tensor | None = None  # float32 [..., 2, kv_heads, block_tokens], exactly where data is QUANTISED
    value_prefix: int | None = None
    """Length of each key's prefix that is the value as well, with the key's scale: then 1 replaces the 2 above. None:
    values are stored apart, as wide as keys.
    """

    @property
    def kinds(self) -> int:
        return 1 if self.value_prefix is not None else 2

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.value_prefix is None else self.value_prefix

    @property
    def kv_heads(self) -> int:
        return self.data.shape[-3]

    @property
    def block_tokens(self) -> int:
        return self.data.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.data.shape[-1]


@dataclass(frozen=True, slots=True)
class KvLayer(_KvHeads):
    """Layer of the pool, by reference: writing to it writes the pool. Data are `[blocks, 2, ...]`."""

    def shared_by(self, groups: int) -> "KvLayer":
        """Return a read-only view of one head repeated for each group of queries, all of the same memory."""
        data, scales = self.data, self.scales
        return KvLayer(
            data.expand(-1, -1, groups, -1, -1),
            None if scales is None else scales.expand(-1, -1, groups, -1),
            self.value_prefix,
        )


@dataclass(frozen=True, slots=True)
class KvPages(_KvHeads):
    """Pool of all layers, by reference; `KvLayout.view` lays it over memory that others own.

    A quantised pool keeps one float32 scale per token and KV head, for keys and for values: number = stored * scale.
    Data are `[blocks, layers, 2, ...]`.
    """

    states: torch.Tensor | None = None  # float32 [blocks, any], of layers without keys and values (delta.py)

    def __post_init__(self) -> None:
        if (self.data.dtype in QUANTISED) != (self.scales is not None):
            raise ValueError(f"KV in {self.data.dtype} {'needs' if self.scales is None else 'has no'} scales")
        if self.scales is not None and (self.scales.dtype, self.scales.shape) != (torch.float32, self.data.shape[:-1]):
            raise ValueError(f"scales must be float32 {list(self.data.shape[:-1])}, got {list(self.scales.shape)}")

    def layer(self, index: int) -> KvLayer:
        return KvLayer(self.data[:, index], None if self.scales is None else self.scales[:, index], self.value_prefix)

    @property
    def blocks(self) -> int:
        return self.data.shape[0]

    @property
    def layers(self) -> int:
        return self.data.shape[1]

    @property
    def device(self) -> torch.device:
        return self.data.device


def check_kv(kv: KvLayer, query: torch.Tensor) -> None:
    """Check that attention of `query`, `[tokens, heads, head_dim]`, can read this layer."""
    check_shape("query", query, None, None, None)
    check_shape("kv", kv.data, None, kv.kinds, None, None, query.shape[2])
    if kv.value_dim > kv.head_dim:
        raise ValueError(f"values are {kv.value_dim} numbers of keys that have {kv.head_dim}")
    if kv.scales is None:
        check_dtype("kv", kv.data, query.dtype)
    if query.shape[1] % kv.kv_heads:
        raise ValueError(f"{query.shape[1]} heads are not a multiple of {kv.kv_heads} KV heads")


@dataclass(frozen=True, slots=True)
class Scoring:
    """Softmax is over `softcap * tanh(query @ key * scale / softcap) + slope * (key position - query position)`.

    softcap: None leaves scores as they are (Gemma 2, arXiv:2408.00118). window: how many tokens a query sees, itself
    included; None sees all before it. alibi_slopes: float32 `[heads]` (ALiBi, arXiv:2108.12409); None is a slope of 0.
    sinks: float32 `[heads]`, of each head the score of a token without a value, which every query sees beside its
    window (gpt-oss, arXiv:2508.10925; the idea: arXiv:2309.17453); None: there is none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the softmax is over scaled products alone, as in `scaled_dot_product_attention`."""
        return self.softcap is None and self.alibi_slopes is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token of each of several sequences, and where their contexts are, as `paged_decode` takes them."""

    block_ids: torch.Tensor  # int64 [used_blocks], behind those of other groups of layers
    block_starts: torch.Tensor  # int64 [sequences + 1], places in `block_ids`
    context_tokens: torch.Tensor  # int64 [sequences]
    usual_tokens: int | None = None
    arrivals: torch.Tensor | None = None
    """Counters: int32 [at least sequences * kv_heads], zeros before and after. Only kernels of one stream may count in
    them. None: a kernel that counts allocates its own.
    """


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of one longer chunk; arguments of `paged_prefill`."""

    rows: slice
    start: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Longer chunks side by side, for the host and as numbers for a device: `paged_prefills` takes them together."""

    chunks: tuple[PrefillRows, ...]  # at least one
    row_starts: torch.Tensor  # int64 [chunks + 1], from the first row of the first one on
    ends: torch.Tensor  # int64 [chunks], positions
    block_ids: torch.Tensor  # int64 [used_blocks], of all of them
    block_starts: torch.Tensor  # int64 [chunks + 1], places in `block_ids`
    by_library: int = 0  # of the last ones, those that a library computes where it can (kernels/libraries/)
    planned: "Callable[[torch.Tensor, KvLayer, Scoring, torch.Tensor], None] | None" = None
    """Computes these last ones, `query` to `out`, until another step is planned; None: each is gathered."""

    def first(self, count: int) -> "PrefillChunks":
        """The first `count` of them, at least one."""
        if count == len(self.chunks):
            return self
        several = count + 1
        return PrefillChunks(
            self.chunks[:count],
            self.row_starts[:several],
            self.ends[:count],
            self.block_ids,
            self.block_starts[:several],
        )

    @classmethod
    def one(cls, tokens: int, start: int, block_ids: torch.Tensor) -> "PrefillChunks":
        numbers = torch.tensor([0, tokens, start + tokens, 0, len(block_ids)], device=block_ids.device)
        return cls(
            (PrefillRows(slice(0, tokens), start, block_ids),), numbers[:2], numbers[2:3], block_ids, numbers[3:]
        )


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Positions of the KV of a step's tokens, and of those before them, in the blocks of one group of layers."""

    slots: torch.Tensor  # int64 [tokens], block * block_tokens + offset
    decode: DecodeRows | None  # the first tokens, of one sequence each
    prefills: PrefillChunks | None  # the others


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The tokens of a step, and which sequences they belong to: single tokens first, then chunks."""

    token_ids: torch.Tensor  # int64 [tokens], each below the size of the vocabulary
    positions: torch.Tensor  # int64 [tokens]
    groups: tuple[GroupRows, ...]  # of each group of layers; all have the same sequences

    @property
    def decode(self) -> DecodeRows | None:
        """Return the decode rows of the first group."""
        return self.groups[0].decode

    @property
    def prefills(self) -> PrefillChunks | None:
        """Return the prefill chunks of the first group."""
        return self.groups[0].prefills


class StateInit(IntEnum):
    """Initial state of a run of rows; as in kernels/native/delta.h."""

    ZERO = 0  # it is a sequence's first
    STORED = 1  # the state of its source
    AGAIN = 2  # likewise, and its one row is in that already: it only reads, and changes nothing
    BROKEN = 3  # that state is after other tokens than those before the run: NaN, so that nothing comes of it


class DeltaRates(NamedTuple):
    """Rates at which each value head forgets: parameters of decay."""

    rate: torch.Tensor  # float32 [value_heads], not above 0
    bias: torch.Tensor  # float32 [value_heads]


@dataclass(frozen=True, slots=True)
class StateRuns:
    """Rows of a step whose layers keep a state: each run is of one sequence, within one block.

    Runs of one sequence follow each other, each from the block that the one before it writes; apart from that no run
    reads what another one writes.
    """

    starts: torch.Tensor  # int64 [runs + 1], of their rows, which follow each other from the first of the step on
    sources: torch.Tensor  # int64 [runs], blocks
    destinations: torch.Tensor  # int64 [runs], blocks, distinct
    begins: torch.Tensor  # int64 [runs], of StateInit; AGAIN only of one row
    alone: int  # so many of the first runs have one row each
    rows: tuple[int, ...]  # of each of the others


def check_scoring(scoring: Scoring, query: torch.Tensor) -> None:
    """Check the scoring of query: `[tokens, heads, head_dim]`."""
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(f"window must be at least 1, got {scoring.window}")
    if scoring.softcap is not None and scoring.softcap <= 0:
        raise ValueError(f"softcap must be positive, got {scoring.softcap}")
    for name, numbers in (("alibi_slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
        if numbers is not None:
            check_shape(name, numbers, query.shape[1])
            check_dtype(name, numbers, torch.float32)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query head and every key head, before they are rotated (Qwen3, arXiv:2505.09388)."""

    query: torch.Tensor  # [head_dim], contiguous, in the dtype of what is computed or float32, as in `rms_norm`
    key: torch.Tensor  # likewise
    eps: float


class Sampled(NamedTuple):
    token_ids: torch.Tensor  # int64 [rows]
    logprobs: torch.Tensor  # float32 [rows], of the model's own distribution: before temperature and filters


class RowStatistics(NamedTuple):
    best: torch.Tensor  # int64 [rows], the likeliest tokens
    log_totals: torch.Tensor  # float32 [rows], logarithms of the sums of e^logit
    finite: torch.Tensor  # bool [rows], whether every number of the row is


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits by their codes: a sign, two bits of an exponent, one of a mantissa (MXFP4)."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Quantised weight of `[outputs, inputs]` numbers; the dtype of data says which format.

    int8 and float8_e4m3fn `[outputs, inputs]`: number = stored * scales[output]. uint8 `[outputs, inputs / 2]` holds
    codes of 4 bits, column c in the low half of byte c and column c + inputs / 2 in its high half:
    number = (code - zeros[output, group]) * scales[output, group], groups being equal runs of columns. Without zeros
    codes are numbers of E2M1: E2M1[code] * scales[output, group].
    """

    data: torch.Tensor
    scales: torch.Tensor  # float32 [outputs]; of codes: any float [outputs, groups]
    zeros: torch.Tensor | None = None  # uint8 [outputs, groups]

    def __post_init__(self) -> None:
        outputs = len(self.data)
        if self.data.dtype == torch.uint8:
            check_shape("scales", self.scales, outputs, None)
            if self.zeros is not None:
                check_shape("zeros", self.zeros, *self.scales.shape)
                check_dtype("zeros", self.zeros, torch.uint8)
        elif self.data.dtype in (torch.int8, torch.float8_e4m3fn):
            check_shape("scales", self.scales, outputs)
            check_dtype("scales", self.scales, torch.float32)
        else:
            raise ValueError(f"a weight in {self.data.dtype} is not read")

    @property
    def outputs(self) -> int:
        return len(self.data)

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * (2 if self.has_codes else 1)

    @property
    def has_codes(self) -> bool:
        return self.data.dtype == torch.uint8


class GatingFunction(Enum):
    """Function that a router's numbers pass through."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule for the experts of a token: those with the highest odds, which are their weights too."""

    per_token: int
    normalised: bool  # whether the weights of a token's experts are scaled to sum to 1
    odds: GatingFunction = GatingFunction.SOFTMAX
    groups: int = 1  # of experts, all of one size
    kept_groups: int = 1  # in which a token's experts lie
    judged_by: int = 1  # so many of a group's best odds together say how good it is
    corrected: bool = False  # the choice is by odds and a number of each expert, the weights are the odds alone
    scale: float = 1.0  # of the weights, at last
    wide: bool = False  # routers multiply in float32 whatever the model computes in
    biased: bool = False  # routers have a bias


class ExpertChoice(NamedTuple):
    """Chosen experts `[rows, per_token]`, the best expert of each row first."""

    weights: torch.Tensor  # float32
    chosen: torch.Tensor  # int64


MIN_WEIGHT_SUM = 1e-20  # sigmoids may all be 0; beside any other sum it is nothing; as in kernels/native/experts.cpp


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Weights of experts. `rows`: `[experts * outputs, inputs]`, expert after expert; plain numbers of any float, or
    quantised.
    """

    rows: torch.Tensor | QuantisedWeight
    experts: int

    def __post_init__(self) -> None:
        if isinstance(self.rows, torch.Tensor):
            check_shape("rows", self.rows, None, None)
        if self.experts < 1 or self._all_outputs % self.experts:
            raise ValueError(f"{self._all_outputs} rows are not as many for each of {self.experts} experts")

    @property
    def outputs(self) -> int:
        """Return the outputs of one expert."""
        return self._all_outputs // self.experts

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] if isinstance(self.rows, torch.Tensor) else self.rows.inputs

    @property
    def _all_outputs(self) -> int:
        return len(self.rows) if isinstance(self.rows, torch.Tensor) else self.rows.outputs


class SortedPairs(NamedTuple):
    """Pairs of a row and an expert that takes it, sorted by expert: pair p is of row `p // (pairs / rows)`.

    Their number follows from shapes, and which expert has how many is never looked at on the host.
    """

    order: torch.Tensor  # int64 [pairs]: the pairs, those of the first expert first
    starts: torch.Tensor  # int64 [experts + 1]: where in `order` each expert's begin, and the end


def sorted_pairs(chosen: torch.Tensor, experts: int) -> SortedPairs:
    """Sort pairs of rows and experts. `chosen`: int64 `[rows, experts per row]`. Never synchronises; all shapes follow
    from its own.
    """
    ordered, order = chosen.flatten().sort(stable=True)
    return SortedPairs(order, torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device)))


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a row of zeros divides by this, not by zero


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., head_dim]` of any floating dtype to `dtype` and float32 scales `[...]`; rows ~ stored * scale.

    Scale = largest magnitude of the row / largest number of the format, so that nothing is clipped (per-token symmetric
    quantisation, as in arXiv:2303.06865 and vLLM's dynamic scales). No calibration, and no row depends on another.
    A row with anything in it that is not finite gets the scale NaN: it reads back as NaN throughout, never clamped.
    """
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scales = scales.masked_fill(scales.isinf(), torch.nan)
    ratio = (wide / scales[..., None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        ratio.round_()  # an integer has no NaN and becomes anything: the scale says what it is
    return ratio.to(dtype), scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: `[..., head_dim]` and `[...]` to `[..., head_dim]` in `dtype`; the product is in float32."""
    return (stored.to(torch.float32) * scales[..., None]).to(dtype)
