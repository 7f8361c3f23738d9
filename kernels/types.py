"""Arguments and results of kernels: layers of the KV pool, scoring, weights, sampled rows; and their checks."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

import torch


class Gate(IntEnum):
    """Activation of gates in a feed-forward layer; twin of `Gate` in kernels/native/linear.h."""

    SILU = 1
    GELU = 2  # tanh approximation
    CLAMPED = 3  # SiLU of a gate bounded by SWIGLU_LIMIT and scaled by SWIGLU_ALPHA, times the bounded factor plus one
    SIGMOID = 4


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of CLAMPED


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Check a shape; `None` matches any size."""
    actual = tensor.shape
    if len(actual) != len(shape) or any(want not in (None, size) for want, size in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(actual)}")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_norm(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Check the weight of a norm over rows of `x`: of its dtype, or float32."""
    check_shape(name, weight, x.shape[-1])
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name} must be {x.dtype} or torch.float32, got {weight.dtype}")


def check_angles(cos: torch.Tensor, sin: torch.Tensor, rows: int, x: torch.Tensor) -> None:
    """Check `[rows, pairs]` for rotating heads of `x`, `[tokens, heads, head_dim]`."""
    check_shape("cos", cos, rows, None)
    check_shape("sin", sin, *cos.shape)
    if cos.shape[1] > x.shape[2] // 2:
        raise ValueError(f"cos must be [{rows}, at most {x.shape[2] // 2}], got {list(cos.shape)}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, x.dtype)


def check_index(name: str, tensor: torch.Tensor, length: int | None = None) -> None:
    """Check a one-dimensional int64 tensor; offsets into a pool soon exceed 2**31 elements."""
    check_shape(name, tensor, length)
    check_dtype(name, tensor, torch.int64)


QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # stored with scales


@dataclass(frozen=True, slots=True)
class _KvHeads:
    data: torch.Tensor  # [..., 2 (keys, values), kv_heads, block_tokens, head_dim]
    scales: torch.Tensor | None = None  # float32 [..., 2, kv_heads, block_tokens], if and only if data is QUANTISED
    value_prefix: int | None = None
    """Leading numbers of each key that are the value too, with the key's scale: then 1 replaces the 2 above. None:
    values are stored apart, with the size of keys.
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
        """Return a read-only view of one KV head as several, one per group of query heads, over the same memory."""
        data, scales = self.data, self.scales
        return KvLayer(
            data.expand(-1, -1, groups, -1, -1),
            None if scales is None else scales.expand(-1, -1, groups, -1),
            self.value_prefix,
        )


@dataclass(frozen=True, slots=True)
class KvPages(_KvHeads):
    """Layers of the pool, by reference; `KvLayout.view` creates it over memory that others own.

    A quantised pool has one float32 scale per token and KV head, for keys and for values: number = stored * scale. Data
    are `[blocks, layers, 2, ...]`.
    """

    states: torch.Tensor | None = None  # float32 [blocks, any], of layers with a recurrent state (delta.py)

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
        raise ValueError(f"value_prefix is {kv.value_dim}, but keys have {kv.head_dim} numbers")
    if kv.scales is None:
        check_dtype("kv", kv.data, query.dtype)
    if query.shape[1] % kv.kv_heads:
        raise ValueError(f"{query.shape[1]} heads are not a multiple of {kv.kv_heads} KV heads")


@dataclass(frozen=True, slots=True)
class Scoring:
    """Attention scores: softmax over `softcap * tanh(query @ key * scale / softcap)`.

    softcap: None leaves scores unbounded (Gemma 2, arXiv:2408.00118). window: tokens a query sees, including its own;
    None: all before it. sinks: float32 `[heads]`, score of a virtual token without a value that every query sees
    (gpt-oss, arXiv:2508.10925; arXiv:2309.17453); None: no such token.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the softmax is over scaled products alone, as in `scaled_dot_product_attention`."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token of each of several sequences, and their contexts, for `paged_decode`."""

    block_ids: torch.Tensor  # int64 [used_blocks], after those of other layer groups
    block_starts: torch.Tensor  # int64 [sequences + 1], indexes into `block_ids`
    context_tokens: torch.Tensor  # int64 [sequences]
    usual_tokens: int | None = None
    arrivals: torch.Tensor | None = None
    """Counters of a kernel, int32 [at least sequences * kv_heads], zero before and after; only kernels of one stream
    use it. None: the kernel allocates its own.
    """


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of one longer chunk: arguments of `paged_prefill`."""

    rows: slice
    start: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Several longer chunks with contiguous rows, for the host and as numbers for a device, for `paged_prefills`."""

    chunks: tuple[PrefillRows, ...]  # at least one
    row_starts: torch.Tensor  # int64 [chunks + 1], from the first chunk's first row
    ends: torch.Tensor  # int64 [chunks], positions
    block_ids: torch.Tensor  # int64 [used_blocks], of all chunks
    block_starts: torch.Tensor  # int64 [chunks + 1], indexes into `block_ids`
    by_library: int = 0  # number of last chunks that a library computes if it can (kernels/libraries/)
    planned: "Callable[[torch.Tensor, KvLayer, Scoring, torch.Tensor], None] | None" = None
    """Function that computes these last chunks from `query` to `out`, valid until another step is planned; None:
    each is gathered.
    """

    def first(self, count: int) -> "PrefillChunks":
        """Return the first `count` chunks, at least one."""
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
    """KV locations of a step's tokens and their contexts in one group of layers."""

    slots: torch.Tensor  # int64 [tokens], block * block_tokens + offset
    decode: DecodeRows | None  # first tokens, of one sequence each
    prefills: PrefillChunks | None  # other tokens


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Tokens of a step and their sequences: single tokens first, then chunks."""

    token_ids: torch.Tensor  # int64 [tokens], each in the vocabulary
    positions: torch.Tensor  # int64 [tokens]
    groups: tuple[GroupRows, ...]  # one per layer group; all have the same sequences

    @property
    def decode(self) -> DecodeRows | None:
        """Decode rows of the first group."""
        return self.groups[0].decode

    @property
    def prefills(self) -> PrefillChunks | None:
        """Chunks of the first group."""
        return self.groups[0].prefills


class StateInit(IntEnum):
    """Initial state of a run; twin of `StateInit` in kernels/native/delta.h."""

    ZERO = 0  # start of a sequence
    STORED = 1  # state of its source
    AGAIN = 2  # state of its source, which already covers its one row: read only
    BROKEN = 3  # the source's state covers other tokens: NaN, which invalidates all results


class DeltaRates(NamedTuple):
    """Decay parameters of each value head."""

    rate: torch.Tensor  # float32 [value_heads], at most 0
    bias: torch.Tensor  # float32 [value_heads]


@dataclass(frozen=True, slots=True)
class StateRuns:
    """Rows of a step for layers with a state: each run is of one sequence, within one block.

    Runs of one sequence are consecutive, each starting from the block that the previous one writes; otherwise no run
    reads what another writes.
    """

    starts: torch.Tensor  # int64 [runs + 1], consecutive from the first row of the step
    sources: torch.Tensor  # int64 [runs], blocks
    destinations: torch.Tensor  # int64 [runs], blocks, distinct
    begins: torch.Tensor  # int64 [runs], of StateInit; AGAIN only for one row
    alone: int  # number of leading runs with one row
    rows: tuple[int, ...]  # of each other run


def check_scoring(scoring: Scoring, query: torch.Tensor) -> None:
    """Check scoring for query `[tokens, heads, head_dim]`."""
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(f"window must be at least 1, got {scoring.window}")
    if scoring.softcap is not None and scoring.softcap <= 0:
        raise ValueError(f"softcap must be positive, got {scoring.softcap}")
    if scoring.sinks is not None:
        check_shape("sinks", scoring.sinks, query.shape[1])
        check_dtype("sinks", scoring.sinks, torch.float32)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query head and key head before rotation (Qwen3, arXiv:2505.09388)."""

    query: torch.Tensor  # [head_dim], contiguous, in the compute dtype or float32, see `rms_norm`
    key: torch.Tensor  # [head_dim], contiguous
    eps: float


class Sampled(NamedTuple):
    token_ids: torch.Tensor  # int64 [rows]
    logprobs: torch.Tensor  # float32 [rows], before temperature and filters


class RowStatistics(NamedTuple):
    best: torch.Tensor  # int64 [rows], most likely tokens
    log_totals: torch.Tensor  # float32 [rows], log of the sum of e^logit
    finite: torch.Tensor  # bool [rows], whether all numbers are finite


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit codes: sign, two exponent bits, one mantissa bit (MXFP4)."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Quantised numbers `[outputs, inputs]`, in a format given by the dtype of data.

    int8 and float8_e4m3fn `[outputs, inputs]`: number = stored * scales[output]. uint8 `[outputs, inputs / 2]`: 4-bit
    codes, column c in the low nibble of byte c and column c + inputs / 2 in its high nibble: number = (code -
    zeros[output, group]) * scales[output, group], with groups of equal runs of columns. Without zeros codes are E2M1:
    E2M1[code] * scales[output, group].
    """

    data: torch.Tensor
    scales: torch.Tensor  # float32 [outputs]; for codes: any float [outputs, groups]
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
            raise ValueError(f"weights in {self.data.dtype} are not supported")

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
    """Gating function of a router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a token's experts: those with the highest gate values, which are also their weights."""

    per_token: int
    normalised: bool  # whether a token's weights are scaled to sum to 1
    odds: GatingFunction = GatingFunction.SOFTMAX
    groups: int = 1  # equally many experts each
    kept_groups: int = 1  # groups that contain a token's experts
    judged_by: int = 1  # best gate values whose sum ranks a group
    corrected: bool = False  # choose by gate value plus a correction per expert; weights exclude it
    scale: float = 1.0  # applied to the weights last
    wide: bool = False  # routers multiply in float32
    biased: bool = False  # routers have a bias


class ExpertChoice(NamedTuple):
    """Chosen experts `[rows, per_token]`, the best first."""

    weights: torch.Tensor  # float32
    chosen: torch.Tensor  # int64


MIN_WEIGHT_SUM = 1e-20  # added to a sum of sigmoids that may be 0; negligible otherwise


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Weights of all experts. `rows`: `[experts * outputs, inputs]`, concatenated; plain floats or quantised."""

    rows: torch.Tensor | QuantisedWeight
    experts: int

    def __post_init__(self) -> None:
        if isinstance(self.rows, torch.Tensor):
            check_shape("rows", self.rows, None, None)
        if self.experts < 1 or self._all_outputs % self.experts:
            raise ValueError(f"{self._all_outputs} rows are not a multiple of {self.experts} experts")

    @property
    def outputs(self) -> int:
        """Outputs per expert."""
        return self._all_outputs // self.experts

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] if isinstance(self.rows, torch.Tensor) else self.rows.inputs

    @property
    def _all_outputs(self) -> int:
        return len(self.rows) if isinstance(self.rows, torch.Tensor) else self.rows.outputs


class SortedPairs(NamedTuple):
    """Pairs of a row and one of its experts, sorted by expert: pair p belongs to row `p // (pairs / rows)`.

    Their number follows from shapes; the host never reads how many each expert has.
    """

    order: torch.Tensor  # int64 [pairs], pair numbers by expert
    starts: torch.Tensor  # int64 [experts + 1], start of each expert in `order`, and the end


def sorted_pairs(chosen: torch.Tensor, experts: int) -> SortedPairs:
    """Sort pairs by expert without waiting for the device. `chosen`: int64 `[rows, experts per row]`."""
    ordered, order = chosen.flatten().sort(stable=True)
    return SortedPairs(order, torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device)))


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # divisor for a row of zeros


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., head_dim]` of any float dtype to `dtype` with float32 scales `[...]`: rows ~ stored * scale.

    Scale = largest magnitude of the row / largest number of the format, so nothing is clipped (per-token symmetric
    quantisation, as in arXiv:2303.06865 and vLLM's dynamic scales). No calibration, and no row depends on another. A
    row with a non-finite value gets the scale NaN and reads back as NaN.
    """
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scales = scales.masked_fill(scales.isinf(), torch.nan)
    ratio = (wide / scales[..., None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        ratio.round_()  # integers have no NaN; the scale carries it
    return ratio.to(dtype), scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise `[..., head_dim]` with scales `[...]` to `dtype`; the product is in float32."""
    return (stored.to(torch.float32) * scales[..., None]).to(dtype)
