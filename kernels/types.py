"""Arguments and results of kernels: layers of the KV pool, scoring, weights, sampled rows; and their checks."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

import torch


class Gate(IntEnum):
    """Activation of gates in a feed-forward layer. kernels/native/linear.h defines the same `Gate`."""

    SILU = 1
    GELU = 2  # GELU in its tanh approximation
    CLAMPED = 3  # g sigmoid(SWIGLU_ALPHA g) (u + 1), with gate g and factor u bounded by SWIGLU_LIMIT
    SIGMOID = 4


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # constants of Gate.CLAMPED


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Check a tensor's shape; `None` in `shape` matches any size."""
    actual = tensor.shape
    if len(actual) != len(shape) or any(want not in (None, size) for want, size in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(actual)}")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_norm(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Check the weight of a norm over rows of `x`: `[numbers of a row]`, in the dtype of `x` or float32."""
    check_shape(name, weight, x.shape[-1])
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name} must be {x.dtype} or torch.float32, got {weight.dtype}")


def check_angles(cos: torch.Tensor, sin: torch.Tensor, rows: int, x: torch.Tensor) -> None:
    """Check cosines and sines, `[rows, pairs]`, that rotate the heads of `x`, `[tokens, heads, head_dim]`."""
    check_shape("cos", cos, rows, None)
    check_shape("sin", sin, *cos.shape)
    if cos.shape[1] > x.shape[2] // 2:
        raise ValueError(f"cos must be [{rows}, at most {x.shape[2] // 2}], got {list(cos.shape)}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, x.dtype)


def check_index(name: str, tensor: torch.Tensor, length: int | None = None) -> None:
    """Check that a tensor of indices is one-dimensional and int64, since pools often have more than 2**31 elements."""
    check_shape(name, tensor, length)
    check_dtype(name, tensor, torch.int64)


QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # dtypes of pools that store scales


@dataclass(frozen=True, slots=True)
class _KvHeads:
    data: torch.Tensor  # [..., 2 (keys, values), kv_heads, block_tokens, head_dim]
    scales: torch.Tensor | None = None  # float32 [..., 2, kv_heads, block_tokens], if and only if data is QUANTISED
    value_prefix: int | None = None
    """Number of leading numbers of each key that are also its value, with the key's scale; then the dimension
    (keys, values) has size 1. None: values are stored separately, with the size of keys.
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
    """View of one layer of the KV pool: writing to it writes the pool. `data`: `[blocks, 2, ...]`."""

    def shared_by(self, groups: int) -> "KvLayer":
        """Return a read-only view of the only KV head as `groups` equal KV heads, one per group of query heads."""
        data, scales = self.data, self.scales
        return KvLayer(
            data.expand(-1, -1, groups, -1, -1),
            None if scales is None else scales.expand(-1, -1, groups, -1),
            self.value_prefix,
        )


@dataclass(frozen=True, slots=True)
class KvPages(_KvHeads):
    """View of the layers of a KV pool, created by `KvLayout.view`. The view does not own the memory.

    `data`: `[blocks, layers, 2, ...]`. A quantised pool has one float32 scale per token and KV head, for keys and for
    values: number = stored * scale.
    """

    states: torch.Tensor | None = None  # float32 [blocks, any], states of recurrent layers (delta.py)

    def __post_init__(self) -> None:
        if (self.data.dtype in QUANTISED) != (self.scales is not None):
            raise ValueError(f"KV in {self.data.dtype} must {'' if self.scales is None else 'not '}have scales")
        if self.scales is not None and (self.scales.dtype, self.scales.shape) != (torch.float32, self.data.shape[:-1]):
            raise ValueError(f"scales must be float32 {list(self.data.shape[:-1])}, got {list(self.scales.shape)}")

    def layer_shaped(self, index: int, kv_heads: int, head_dim: int) -> KvLayer:
        """Return a layer whose keys have another shape, and take the room of one or several layers from `index` on."""
        if (kv_heads, head_dim) == (self.kv_heads, self.head_dim):
            return self.layer(index)
        layers = kv_heads * head_dim // (self.kv_heads * self.head_dim)
        rows = self.data[:, index : index + layers]
        return KvLayer(rows.view(self.blocks, self.kinds, kv_heads, self.block_tokens, head_dim))

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
    """Check that attention of `query`, `[tokens, heads, head_dim]`, can read layer `kv` of the pool."""
    check_shape("query", query, None, None, None)
    check_shape("kv", kv.data, None, kv.kinds, None, None, query.shape[2])
    if kv.value_dim > kv.head_dim:
        raise ValueError(f"value_prefix must be at most {kv.head_dim}, the size of a key, got {kv.value_dim}")
    if kv.scales is None:
        check_dtype("kv", kv.data, query.dtype)
    if query.shape[1] % kv.kv_heads:
        raise ValueError(f"{query.shape[1]} heads are not a multiple of {kv.kv_heads} KV heads")


@dataclass(frozen=True, slots=True)
class Scoring:
    """Attention scores: softmax over `softcap * tanh(query @ key * scale / softcap)`.

    softcap: bound of the scores (Gemma 2, arXiv:2408.00118); None: scores are `query @ key * scale`, unbounded. window:
    number of tokens that a query sees, including its own; None: a query sees all earlier tokens. sinks: float32
    `[heads]`, score of a virtual token without a value, which every query sees (gpt-oss, arXiv:2508.10925;
    arXiv:2309.17453); None: no such token.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether scores are only scaled products, without softcap and sinks, as in PyTorch's attention."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Argument of `paged_decode`: one token of each of several sequences, and the sequences' contexts."""

    block_ids: torch.Tensor  # int64 [any]; block_starts[0] is the first used entry
    block_starts: torch.Tensor  # int64 [sequences + 1], indexes into `block_ids`
    context_tokens: torch.Tensor  # int64 [sequences]
    usual_tokens: int | None = None
    arrivals: torch.Tensor | None = None
    """Counters for a kernel, int32 [at least sequences * kv_heads], zero before and after it. Only kernels of one CUDA
    stream may use the same counters. None: the kernel allocates its own.
    """


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Prompt chunk in a step: its rows, its first position and its blocks, as arguments of `paged_prefill`."""

    rows: slice
    start: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Argument of `paged_prefills`: several prompt chunks whose rows are contiguous.

    The host reads `chunks`. Kernels on a device read the tensors, which contain the same numbers.
    """

    chunks: tuple[PrefillRows, ...]  # at least one chunk
    row_starts: torch.Tensor  # int64 [chunks + 1], counted from the first row of the first chunk
    ends: torch.Tensor  # int64 [chunks], position after the last token of each chunk
    block_ids: torch.Tensor  # int64 [used_blocks], blocks of all chunks, one chunk after another
    block_starts: torch.Tensor  # int64 [chunks + 1], indexes into `block_ids`
    by_library: int = 0  # number of last chunks that a library computes if it can (kernels/libraries/)
    planned: "Callable[[torch.Tensor, KvLayer, Scoring, torch.Tensor], None] | None" = None
    """Function that computes the last `by_library` chunks, valid until another step is planned. None: PyTorch computes
    each of these over gathered keys and values.
    """

    def first(self, count: int) -> "PrefillChunks":
        """Return only the first `count` chunks. `count` is at least 1."""
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
    """Slots of a step's new tokens, and blocks of their contexts, in the KV pool of one layer group."""

    slots: torch.Tensor  # int64 [tokens], block * block_tokens + offset
    decode: DecodeRows | None  # the step's leading tokens, each of which is the only one of its sequence
    prefills: PrefillChunks | None  # the step's other tokens, in chunks


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Tokens of a step: first the tokens of sequences with one token each (decode), then those of prompt chunks."""

    token_ids: torch.Tensor  # int64 [tokens], each in the vocabulary
    positions: torch.Tensor  # int64 [tokens]
    groups: tuple[GroupRows, ...]  # one per layer group; all have the same sequences

    @property
    def decode(self) -> DecodeRows | None:
        """Decode rows of the first layer group; None without any."""
        return self.groups[0].decode

    @property
    def prefills(self) -> PrefillChunks | None:
        """Prompt chunks of the first layer group; None without any."""
        return self.groups[0].prefills


class StateInit(IntEnum):
    """Kind of a run's initial state. kernels/native/delta.h defines the same `StateInit`."""

    ZERO = 0  # zeros, since the run begins its sequence
    STORED = 1  # state stored in the source block
    AGAIN = 2  # state stored in the source block; it already covers the run's one row and must not change
    BROKEN = 3  # NaN, so that all results are NaN: the stored state covers wrong tokens


class DeltaRates(NamedTuple):
    """Decay parameters of each value head."""

    rate: torch.Tensor  # float32 [value_heads], at most 0
    bias: torch.Tensor  # float32 [value_heads]


class StateRates(NamedTuple):
    """Parameters of the heads of a state space, and the limits of their time steps."""

    rate: torch.Tensor  # float32 [heads], at most 0
    bias: torch.Tensor  # float32 [heads], added to time steps
    skip: torch.Tensor  # float32 [heads], factor of a token's values in its own output
    least_step: float
    most_step: float


@dataclass(frozen=True, slots=True)
class StateRuns:
    """Runs of a step for layers with a recurrent state. A run is consecutive rows of one sequence within one block.

    Runs of one sequence are consecutive, and each starts from the block that the previous run writes. Apart from this,
    no run reads a block that another run writes.
    """

    starts: torch.Tensor  # int64 [runs + 1], first row of each run, and the end of the last run
    sources: torch.Tensor  # int64 [runs], block from whose state the run starts
    destinations: torch.Tensor  # int64 [runs], block to which the run writes its state; no two runs share one
    begins: torch.Tensor  # int64 [runs], values of StateInit; AGAIN only for runs with one row
    alone: int  # number of leading runs with one row
    rows: tuple[int, ...]  # number of rows of each run after the `alone` first runs


def check_scoring(scoring: Scoring, query: torch.Tensor) -> None:
    """Check `scoring` for a `query` of shape `[tokens, heads, head_dim]`."""
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(f"window must be at least 1, got {scoring.window}")
    if scoring.softcap is not None and scoring.softcap <= 0:
        raise ValueError(f"softcap must be positive, got {scoring.softcap}")
    if scoring.sinks is not None:
        check_shape("sinks", scoring.sinks, query.shape[1])
        check_dtype("sinks", scoring.sinks, torch.float32)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMSNorm of each query head and key head before rotation (Qwen3, arXiv:2505.09388)."""

    query: torch.Tensor  # [head_dim], contiguous, in the compute dtype or float32, see `rms_norm`
    key: torch.Tensor  # [head_dim], contiguous
    eps: float


class Sampled(NamedTuple):
    token_ids: torch.Tensor  # int64 [rows]
    logprobs: torch.Tensor  # float32 [rows], before temperature and filters


class RowStatistics(NamedTuple):
    best: torch.Tensor  # int64 [rows], most likely token of each row
    log_totals: torch.Tensor  # float32 [rows], log of the sum of all e^logit of the row
    finite: torch.Tensor  # bool [rows], whether all logits of the row are finite


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code of E2M1 (MXFP4): sign, two exponent bits, one mantissa bit."""


ZERO_PARTS = 8
"""Zero points of 4-bit codes are stored in eighths of a code. With integers a small model loses twice as much."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Quantised weight of shape `[outputs, inputs]`. The dtype of `data` gives the format.

    int8 and float8_e4m3fn: `data` is `[outputs, inputs]`, number = data * scales[output]. uint8: `data` is `[outputs,
    inputs / 2]` with two 4-bit codes per byte: byte c has column c in its low nibble and column c + inputs / 2 in its
    high nibble. Columns are split into groups of equal size. With zeros, number = (code - zeros[output, group] / 8) *
    scales[output, group]; without, number = E2M1[code] * scales[output, group].
    """

    data: torch.Tensor
    scales: torch.Tensor  # float32 [outputs]; for codes: any float [outputs, groups]
    zeros: torch.Tensor | None = None  # uint8 [outputs, groups], in ZERO_PARTS of a code

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
            raise ValueError(f"data of a weight must be uint8, int8 or float8_e4m3fn, got {self.data.dtype}")

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
    """Function that turns the logits of an expert layer's router into gate values."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a layer chooses a token's experts, those with the highest gate values, and the experts' weights."""

    per_token: int
    normalised: bool  # whether a token's weights are scaled to sum to 1
    odds: GatingFunction = GatingFunction.SOFTMAX
    groups: int = 1  # number of equal groups into which the experts are split
    kept_groups: int = 1  # number of groups from which a token's experts are chosen
    judged_by: int = 1  # number of a group's highest gate values whose sum ranks the group
    corrected: bool = False  # whether a correction is added to gate values to choose experts, but not in weights
    scale: float = 1.0  # factor of the weights, applied last
    wide: bool = False  # whether the router multiplies in float32
    biased: bool = False  # whether the router has a bias


class ExpertChoice(NamedTuple):
    """Chosen experts of each row and their weights, `[rows, per_token]`, sorted by descending gate value."""

    weights: torch.Tensor  # float32
    chosen: torch.Tensor  # int64


MIN_WEIGHT_SUM = 1e-20  # added to sums of gate values before a division, since a sum of sigmoids may be 0


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Weights of all experts of a layer, concatenated in `rows`: `[experts * outputs, inputs]`."""

    rows: torch.Tensor | QuantisedWeight
    experts: int

    def __post_init__(self) -> None:
        if isinstance(self.rows, torch.Tensor):
            check_shape("rows", self.rows, None, None)
        if self.experts < 1 or self._all_outputs % self.experts:
            raise ValueError(f"{self._all_outputs} rows are not a multiple of {self.experts} experts")

    @property
    def outputs(self) -> int:
        """Number of outputs of one expert."""
        return self._all_outputs // self.experts

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] if isinstance(self.rows, torch.Tensor) else self.rows.inputs

    @property
    def _all_outputs(self) -> int:
        return len(self.rows) if isinstance(self.rows, torch.Tensor) else self.rows.outputs


class SortedPairs(NamedTuple):
    """Pairs of a row and one of its experts, sorted by expert. The row of pair p is `p // experts per row`.

    The host knows the total number of pairs from shapes, but does not read the number of pairs of each expert.
    """

    order: torch.Tensor  # int64 [pairs], pair numbers, sorted by expert
    starts: torch.Tensor  # int64 [experts + 1], index in `order` of each expert's first pair, and the end


def sorted_pairs(chosen: torch.Tensor, experts: int) -> SortedPairs:
    """Sort pairs by expert, without waiting for the device. `chosen`: experts of each row, int64 `[rows, per row]`."""
    ordered, order = chosen.flatten().sort(stable=True)
    return SortedPairs(order, torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device)))


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # scale of a row of zeros; not 0, since scales are divisors


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows `[..., head_dim]` of any float dtype to `dtype`; return them and their float32 scales `[...]`.

    row ~ stored * scale, with scale = largest magnitude of the row / largest number of `dtype`, so that nothing is
    clipped (per-token symmetric quantisation, as in arXiv:2303.06865 and vLLM's dynamic scales). No calibration
    is needed, and no row's result depends on other rows. A row with a non-finite value gets the scale NaN, so that
    all its dequantised numbers are NaN.
    """
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scales = scales.masked_fill(scales.isinf(), torch.nan)
    ratio = (wide / scales[..., None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        ratio.round_()  # an integer cannot represent NaN, but the scale is NaN then
    return ratio.to(dtype), scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise rows `[..., head_dim]` with scales `[...]` to `dtype`. The product is computed in float32."""
    return (stored.to(torch.float32) * scales[..., None]).to(dtype)
