"""Native kernels for Python: one library per processor, loaded once, whose functions take C structs.

Structs only borrow memory, so keep their tensors alive. Operations have the names, arguments and contracts of the
functions in kernels/*.py. The number of threads is chosen here too (`native_threads`).
"""

import ctypes
import functools
import threading
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.native.build import best_library, processor_level
from baton.kernels.native.structs import (
    HEAD_DIM_MULTIPLE,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MOST_PIECES,
    ConvolutionStruct,
    DecodeArgumentsStruct,
    DeltaRuleStruct,
    ExpertsStruct,
    GatedWeightsStruct,
    GatherArgumentsStruct,
    HeadLinearArgumentsStruct,
    LinearArgumentsStruct,
    PagesStruct,
    PrefillArgumentsStruct,
    RotateStoreStruct,
    RoutingStruct,
    SampleArgumentsStruct,
    ScoringStruct,
    StateRunsStruct,
    StateScanStruct,
    SurveyArgumentsStruct,
    TakeArgumentsStruct,
    WeightStruct,
    check_limits,
)
from baton.kernels.packed_weight import PackedExperts, PackedGated, PackedWeight
from baton.kernels.types import (
    DecodeRows,
    DeltaRates,
    Gate,
    GatingFunction,
    HeadNorms,
    KvLayer,
    RowStatistics,
    Sampled,
    Scoring,
    StateRates,
    StateRuns,
)

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3, torch.int8: 4}


def pages_struct(kv: KvLayer) -> PagesStruct:
    scales = kv.scales
    strides, scale_strides = kv.data.stride()[:4], (0, 0, 0) if scales is None else scales.stride()[:3]
    if kv.value_prefix is not None:  # values are prefixes of keys: both have the same addresses
        strides, scale_strides = (strides[0], 0, *strides[2:]), (scale_strides[0], 0, scale_strides[2])
    return PagesStruct(
        kv.data.data_ptr(),
        *strides,
        pointer(scales),
        *scale_strides,
        kv.block_tokens,
        ELEMENTS[kv.data.dtype],
    )


def scoring_struct(scoring: Scoring) -> ScoringStruct:
    return ScoringStruct(scoring.scale, scoring.softcap or 0.0, scoring.window or 0, pointer(scoring.sinks))


def weight_struct(weight: PackedWeight) -> WeightStruct:
    return WeightStruct(
        *pointers((weight.data, weight.scales, weight.zeros, weight.offsets, weight.bias)),
        weight.outputs,
        weight.inputs,
        weight.group_inputs,
        weight.stored,
    )


def gated_struct(gated: PackedGated) -> GatedWeightsStruct:
    gate = SQUARED_RELU if gated.gate is None else gated.gate
    return GatedWeightsStruct(weight_struct(gated.gate_up), weight_struct(gated.down), gate)


def experts_struct(mixture: PackedExperts) -> ExpertsStruct:
    """Build the struct of a layer of experts. The struct keeps the experts' structs alive, but not their tensors."""
    routing, shared, gate = mixture.routing, mixture.shared, mixture.shared_gate
    return ExpertsStruct(
        weight_struct(mixture.router),
        pointer(mixture.correction),
        (GatedWeightsStruct * len(mixture.experts))(*map(gated_struct, mixture.experts)),
        None if shared is None else ctypes.pointer(gated_struct(shared)),
        None if gate is None else ctypes.pointer(weight_struct(gate)),
        RoutingStruct(
            *(routing.per_token, routing.groups, routing.kept_groups, routing.judged_by, routing.scale),
            *(routing.odds is GatingFunction.SIGMOID, routing.normalised),
        ),
    )


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pointers(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    return [pointer(tensor) for tensor in tensors]


class _OfThread(threading.local):
    count: int | None = None  # threads of an operation; None: as many as PyTorch uses
    borrowed: int = 0


_of_thread = _OfThread()


def native_threads() -> int:
    """Return the number of threads of a native operation that the calling thread starts: PyTorch's plus borrowed ones.

    The thread pool is in kernels/native/threads.cpp.
    """
    return (_of_thread.count or torch.get_num_threads()) + _of_thread.borrowed


@contextmanager
def pytorch_alone() -> Iterator[None]:
    """Run PyTorch's own operations on the calling thread alone. Native kernels keep their number of threads.

    Otherwise OpenMP's threads would spin for milliseconds after each operation, on the cores that native kernels need.
    """
    before, threads = _of_thread.count, torch.get_num_threads()
    _of_thread.count = before or threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _of_thread.count = before


SQUARED_RELU = 5  # `Gate::relu2` of linear.h, which has no gates
ARGUMENTS = {
    "linear": (POINTER(LinearArgumentsStruct),),
    "head_linear": (POINTER(HeadLinearArgumentsStruct),),
    "gather_rows": (POINTER(GatherArgumentsStruct),),
    "packed_experts": (c_void_p, c_int64, POINTER(ExpertsStruct), c_void_p, c_int32),
    "rms_norm": (c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int32),
    "gate_mul": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32),
    "rotate_and_store": (POINTER(RotateStoreStruct),),
    "paged_prefill": (POINTER(PrefillArgumentsStruct),),
    "paged_decode": (POINTER(DecodeArgumentsStruct),),
    "causal_convolution": (POINTER(ConvolutionStruct),),
    "gated_delta_rule": (POINTER(DeltaRuleStruct),),
    "state_space_scan": (POINTER(StateScanStruct),),
    "survey_rows": (POINTER(SurveyArgumentsStruct),),
    "sample_tokens": (POINTER(SampleArgumentsStruct),),
    "take_rows": (POINTER(TakeArgumentsStruct),),
    "weighted_sum": (c_void_p, c_void_p, c_int64),
    "borrow": (c_void_p, c_int32, POINTER(c_int32), c_int32),
    "decoder_layers": (c_void_p,),
}


class NativeLibrary:
    """Kernels of one shared library. Calls release the GIL.

    Tensors are contiguous float32, except arguments of attention; logits are float32 with contiguous rows.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        check_limits(library)
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"baton_{name}")
            function.argtypes, function.restype = arguments, None
        library.baton_gather_rows.restype = c_int32
        library.baton_weighted_sum.restype = c_uint64
        self.multiplies_bytes = bool(library.baton_multiplies_bytes())  # whether int8 weights may have `group_inputs`
        self.name = path.stem  # name with instruction-set level and digest, see build.py
        self._library = library
        self.decoder_layers = library.baton_decoder_layers  # native function; decoder.py builds its argument
        self._mixtures: WeakKeyDictionary[PackedExperts, ExpertsStruct] = WeakKeyDictionary()
        self._in_use: npt.NDArray[np.uint8] | None = None

    def borrow(self, cores: Collection[int], in_use: npt.NDArray[np.uint8]) -> None:
        """Let operations of the calling thread use one more thread per core of `cores`, at the lowest priority.

        `in_use`: byte that the owner of the cores writes; the additional threads compute only while it is 0. Call this
        once per process, before operations use more threads than PyTorch's current number.
        """
        self._in_use = in_use
        numbers = (ctypes.c_int32 * len(cores))(*cores)
        self._library.baton_borrow(in_use.ctypes.data, torch.get_num_threads(), numbers, len(cores))
        _of_thread.borrowed = len(cores)

    def paged_prefill(
        self, query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
    ) -> torch.Tensor:
        wide = query.float().contiguous()
        tokens, heads, head_dim = wide.shape
        output = torch.empty(tokens, heads, kv.value_dim)
        arguments = PrefillArgumentsStruct(
            pages_struct(kv),
            scoring_struct(scoring),
            *pointers((wide, output, block_ids)),
            tokens,
            heads,
            kv.kv_heads,
            head_dim,
            kv.value_dim,
            start,
            native_threads(),
        )
        self._library.baton_paged_prefill(arguments)
        return output.to(query.dtype)

    def paged_decode(self, query: torch.Tensor, kv: KvLayer, rows: DecodeRows, scoring: Scoring) -> torch.Tensor:
        wide = query.float().contiguous()
        sequences, heads, head_dim = wide.shape
        output = torch.empty(sequences, heads, kv.value_dim)
        parts = torch.empty(sequences * MOST_PIECES * heads * (kv.value_dim + 2))
        arguments = DecodeArgumentsStruct(
            pages_struct(kv),
            scoring_struct(scoring),
            *pointers((wide, output, parts, rows.block_ids, rows.block_starts, rows.context_tokens)),
            sequences,
            heads,
            kv.kv_heads,
            head_dim,
            kv.value_dim,
            native_threads(),
        )
        self._library.baton_paged_decode(arguments)
        return output.to(query.dtype)

    def packed_linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        x = x.contiguous()
        return self._linear(x, weight, torch.empty(len(x), weight.outputs))

    def gated_linear(self, x: torch.Tensor, weight: PackedWeight, gate: Gate) -> torch.Tensor:
        x = x.contiguous()
        return self._linear(x, weight, torch.empty(len(x), weight.outputs // 2), gate)

    def _linear(self, x: torch.Tensor, weight: PackedWeight, output: torch.Tensor, gate: int = 0) -> torch.Tensor:
        arguments = (weight_struct(weight), *pointers((x, output)), len(x), native_threads(), gate)
        self._library.baton_linear(LinearArgumentsStruct(*arguments))
        return output

    def head_linear(self, x: torch.Tensor, weight: PackedWeight, heads: int) -> torch.Tensor:
        rows, by_head = len(x), x.transpose(0, 1).contiguous()
        output = torch.empty(heads, rows, weight.outputs // heads)
        arguments = (weight_struct(weight), *pointers((by_head, output)), rows, heads, native_threads())
        self._library.baton_head_linear(HeadLinearArgumentsStruct(*arguments))
        return output.transpose(0, 1)

    def packed_experts(self, x: torch.Tensor, mixture: PackedExperts) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        if (asked := self._mixtures.get(mixture)) is None:
            asked = self._mixtures[mixture] = experts_struct(mixture)
        self._library.baton_packed_experts(x.data_ptr(), len(x), byref(asked), output.data_ptr(), native_threads())
        return output

    def gather_rows(self, token_ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Look up the rows of `weight` for `token_ids`. Raises: IndexError for an invalid id."""
        token_ids = token_ids.contiguous()
        rows = torch.empty(len(token_ids), weight.inputs)
        arguments = (weight_struct(weight), *pointers((token_ids, rows)), len(token_ids), native_threads())
        if not self._library.baton_gather_rows(GatherArgumentsStruct(*arguments)):
            raise IndexError(f"token id out of range; the weight has {weight.outputs} rows")
        return rows

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()  # references that keep contiguous copies alive during the call
        output, size = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // size
        self._library.baton_rms_norm(*pointers((x, weight)), rows, size, eps, output.data_ptr(), native_threads())
        return output

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate = Gate.SILU) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty(rows, size)
        self._library.baton_gate_mul(gate_up.data_ptr(), rows, size, gate, output.data_ptr(), native_threads())
        return output

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None,
        kv: KvLayer,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        qkv, cos, sin, slots = (each.contiguous() for each in (qkv, cos, sin, slots))
        rows, all_heads, head_dim = qkv.shape
        heads = all_heads - 2 * kv.kv_heads
        query = torch.empty(rows, heads, head_dim)
        arguments = RotateStoreStruct(
            pages_struct(kv),
            *pointers((qkv, query, cos, sin, slots)),
            pointer(None if norms is None else norms.query),
            pointer(None if norms is None else norms.key),
            rows,
            heads,
            kv.kv_heads,
            head_dim,
            head_dim,
            2 * cos.shape[1],
            0.0 if norms is None else norms.eps,
            False,
            native_threads(),
        )
        self._library.baton_rotate_and_store(byref(arguments))
        return query

    def causal_convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        states: torch.Tensor,
        runs: StateRuns,
        bias: torch.Tensor | None = None,
        activates: bool = True,
    ) -> torch.Tensor:
        wide, weight = x.float().contiguous(), weight.float().contiguous()
        bias = None if bias is None else bias.float().contiguous()
        output, (channels, kernel) = torch.empty_like(wide), weight.shape
        arguments = ConvolutionStruct(
            *pointers((wide, weight, bias, output, states)),
            runs_struct(runs),
            channels,
            states.stride(0),
            channels,
            kernel,
            activates,
            native_threads(),
        )
        self._library.baton_causal_convolution(byref(arguments))
        return output.to(x.dtype)

    def gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        rates: DeltaRates,
        states: torch.Tensor,
        runs: StateRuns,
    ) -> torch.Tensor:
        decay, beta = decay.float().contiguous(), beta.float().contiguous()
        query, key, value = (
            each if _has_whole_rows(each) else each.contiguous() for each in (query.float(), key.float(), value.float())
        )
        output = torch.empty(value.shape)
        arguments = DeltaRuleStruct(
            *pointers((query, key, value, decay, beta, *rates, output, states)),
            runs_struct(runs),
            *(each.stride(0) for each in (query, key, value, states)),
            *(key.shape[1], value.shape[1], key.shape[2], value.shape[2]),
            native_threads(),
        )
        self._library.baton_gated_delta_rule(byref(arguments))
        return output

    def state_space_scan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: torch.Tensor,
        rates: StateRates,
        states: torch.Tensor,
        runs: StateRuns,
    ) -> torch.Tensor:
        query, key, value = (
            each if _has_whole_rows(each) else each.contiguous() for each in (query.float(), key.float(), value.float())
        )
        steps = steps.float().contiguous()
        output = torch.empty(value.shape)
        arguments = StateScanStruct(
            *pointers((query, key, value, steps, rates.rate, rates.bias, rates.skip, output, states)),
            runs_struct(runs),
            *(each.stride(0) for each in (query, key, value, steps, states)),
            *(key.shape[1], value.shape[1], key.shape[2], value.shape[2]),
            *(rates.least_step, rates.most_step),
            native_threads(),
        )
        self._library.baton_state_space_scan(byref(arguments))
        return output

    def row_statistics(
        self, logits: torch.Tensor, allowed: Sequence[torch.Tensor | None] | None = None
    ) -> RowStatistics:
        rows, size = logits.shape
        found = RowStatistics(
            torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows, dtype=torch.bool)
        )
        masks = array("q")  # for each row: address of its mask, and bytes of the mask
        for bits in allowed or ():
            masks.extend((0, 0) if bits is None else (bits.data_ptr(), bits.numel()))
        address = masks.buffer_info()[0] if allowed else None
        arguments = (logits.data_ptr(), address, *pointers(found), rows, size, logits.stride(0), native_threads())
        self._library.baton_survey_rows(SurveyArgumentsStruct(*arguments))
        return found

    def sample_tokens(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniform: torch.Tensor,
        may_ban: bool,
        out: Sampled,
    ) -> None:
        rows, size = logits.shape
        of_rows = [each.contiguous() for each in (temperature, top_k, top_p, uniform)]
        self._library.baton_sample_tokens(
            SampleArgumentsStruct(*pointers((logits, *of_rows, *out)), rows, size, logits.stride(0), native_threads())
        )
        if not may_ban:
            out.logprobs.masked_fill_(logits.amin(1) == -torch.inf, torch.nan)

    def masked_rows(
        self, logits: torch.Tensor, places: Sequence[int], allowed: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        rows = array("q")  # for each result row: row of `logits`, address of its mask, and bytes of the mask
        for place, bits in zip(places, allowed, strict=True):
            rows.extend((place, 0, 0) if bits is None else (place, bits.data_ptr(), bits.numel()))
        count, size = len(places), logits.shape[1]
        taken = torch.empty(count, size)
        address, _ = rows.buffer_info()
        self._library.baton_take_rows(
            TakeArgumentsStruct(logits.data_ptr(), taken.data_ptr(), address, count, size, logits.stride(0))
        )
        return taken

    def weighted_sum(self, words: npt.NDArray[np.uint32], factors: npt.NDArray[np.uint64]) -> int:
        """Return the sum of all products of a word and its factor, modulo 2^64. Runs on the calling thread alone."""
        return int(self._library.baton_weighted_sum(words.ctypes.data, factors.ctypes.data, len(words)))


def runs_struct(runs: StateRuns) -> StateRunsStruct:
    return StateRunsStruct(*pointers((runs.starts, runs.sources, runs.destinations, runs.begins)), len(runs.sources))


def _has_whole_rows(x: torch.Tensor) -> bool:
    """Return whether each row of `[rows, heads, size]` is contiguous; there may be gaps between rows."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def computes(x: torch.Tensor) -> bool:
    """Return whether the native kernels other than attention support this tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def stores(kv: KvLayer) -> bool:
    """Return whether native kernels can write keys and values to this layer of a pool."""
    return kv.data.dtype in ELEMENTS and kv.data.stride(4) == 1


def attends(query: torch.Tensor, kv: KvLayer) -> bool:
    """Return whether native attention supports these tensors. Otherwise the reference computes attention."""
    heads, head_dim = query.shape[1:]
    return (
        query.device.type == "cpu"
        and stores(kv)
        and head_dim % HEAD_DIM_MULTIPLE == 0
        and kv.value_dim % HEAD_DIM_MULTIPLE == 0
        and head_dim <= MAX_HEAD_DIM
        and heads <= MAX_HEADS
        and heads // kv.kv_heads <= MAX_GROUP
    )


@functools.cache
def native_library() -> NativeLibrary | None:
    """Load the library of the highest level that is built and that this processor supports; None if there is none.

    Raises: LimitMismatch.
    """
    path = best_library(processor_level())
    return None if path is None else NativeLibrary(path)
