"""Compiles the Triton kernels ahead of time, without a GPU, and prints the resources that they use.

    .venv/bin/python -m baton.lab.benchmarks.triton.compile --arch 80 90 100 [--kernel paged_decode] [--json FILE]

Prints registers, spilled bytes and shared memory of each kernel and dtype. Exits with 1 if a kernel of decode spills.

Every kernel is compiled for every dtype that it is used with, at sizes of real models. Tensors are on the `meta`
device: they have shapes and dtypes, but no memory.
"""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import torch
import triton
from triton import knobs

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels.triton.delta import convolution_call, rule_call
from baton.kernels.triton.few_rows import fused_call
from baton.kernels.triton.launch import Device, KernelCall
from baton.kernels.triton.linear import dequantise_call, expert_call, linear_calls
from baton.kernels.triton.norms import gate_call, norm_call
from baton.kernels.triton.paged_decode import decode_call
from baton.kernels.triton.paged_prefill import prefill_calls
from baton.kernels.triton.pages import Turning, copy_call, rotate_call, store_call
from baton.kernels.triton.sample import sample_calls
from baton.kernels.types import (
    QUANTISED,
    DecodeRows,
    DeltaRates,
    ExpertWeight,
    Gate,
    HeadNorms,
    KvPages,
    PrefillChunks,
    PrefillRows,
    QuantisedWeight,
    Sampled,
    Scoring,
    SortedPairs,
    StateRuns,
)
from baton.lab.benchmarks.triton.absent_gpu import absent_gpu
from baton.lab.report.result import judge_rounds, make_parser, make_result, write_result

LAYERS, BLOCKS, BLOCK_TOKENS = 32, 4096, 32
KV_HEADS, GROUP = 8, 4
HIDDEN, FEED_FORWARD, VOCAB = 4096, 14336, 128256
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class KernelCase:
    name: str
    calls: Callable[[Device], list[KernelCall]]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def indices(count: int) -> torch.Tensor:
    return tensor(count, dtype=torch.int64)


def pages(dtype: torch.dtype, head_dim: int) -> KvPages:
    layout = KvLayout(LAYERS, KV_HEADS, BLOCK_TOKENS, head_dim, dtype)
    return layout.view(tensor(BLOCKS * layout.block_bytes, dtype=torch.uint8), BLOCKS)


def decode(sequences: int, stored: torch.dtype, computed: torch.dtype, head_dim: int, scoring: Scoring) -> KernelCase:
    def calls(device: Device) -> list[KernelCall]:
        query = tensor(sequences, KV_HEADS * GROUP, head_dim, dtype=computed)
        blocks = indices(sequences * 128)
        kv = pages(stored, head_dim).layer(1)
        starts, contexts = indices(sequences + 1), indices(sequences)
        return [decode_call(query, kv, DecodeRows(blocks, starts, contexts), scoring, torch.empty_like(query), device)]

    return KernelCase(f"paged_decode {_name(stored)}/{_name(computed)} {head_dim} x{sequences} {_said(scoring)}", calls)


def rotated(
    sequences: int, stored: torch.dtype, computed: torch.dtype, head_dim: int, scoring: Scoring, group: int = GROUP
) -> KernelCase:
    """Return the case of decode attention whose kernel also normalises and rotates the heads and stores the KV."""

    def calls(device: Device) -> list[KernelCall]:
        qkv = tensor(sequences, KV_HEADS * (group + 2), head_dim, dtype=computed)
        kv, row = pages(stored, head_dim).layer(1), indices(sequences)
        half, norm = tensor(4096, head_dim // 2, dtype=computed), tensor(head_dim, dtype=computed)
        turning = Turning(half, half, row, HeadNorms(norm, norm, 1e-6), row)
        rows = DecodeRows(indices(sequences * 128), indices(sequences + 1), row)
        output = tensor(sequences, KV_HEADS * group, head_dim, dtype=computed)
        return [decode_call(qkv, kv, rows, scoring, output, device, turning=turning)]

    sizes = f"{head_dim} x{sequences} {group} heads a key's"
    return KernelCase(f"rotated_decode {_name(stored)}/{_name(computed)} {sizes} {_said(scoring)}", calls)


def prefill(
    tokens: int, stored: torch.dtype, computed: torch.dtype, head_dim: int, scoring: Scoring, start: int = 256
) -> KernelCase:
    def calls(device: Device) -> list[KernelCall]:
        query = tensor(tokens, KV_HEADS * GROUP, head_dim, dtype=computed)
        kv = pages(stored, head_dim).layer(1)
        blocks, two = indices((start + tokens) // 32 + 1), indices(2)
        chunk = PrefillRows(slice(0, tokens), start, blocks)
        prefills = PrefillChunks((chunk,), two, indices(1), blocks, two)
        return prefill_calls(query, kv, prefills, scoring, torch.empty_like(query), device)

    sizes = f"{head_dim} x{tokens}" + (f" after {start}" if start != 256 else "")
    return KernelCase(f"paged_prefill {_name(stored)}/{_name(computed)} {sizes} {_said(scoring)}", calls)


def latent(stored: torch.dtype, computed: torch.dtype) -> KernelCase:
    """Return the case of DeepSeek's latent attention with 128 heads: decode, prefill and storing."""

    def calls(device: Device) -> list[KernelCall]:
        layout = KvLayout(LAYERS, 1, BLOCK_TOKENS, 576, stored, 512)
        kv = layout.view(tensor(BLOCKS * layout.block_bytes, dtype=torch.uint8), BLOCKS).layer(1)
        starts, slots, shared = indices(9), indices(8), kv.shared_by(8)
        query, attended = tensor(8, 128, 576, dtype=computed), tensor(8, 128, 512, dtype=computed)
        rows = DecodeRows(indices(8 * 128), starts, slots)
        chunk = PrefillRows(slice(0, 8), 4096, indices(129))
        prefills = PrefillChunks((chunk,), indices(2), indices(1), indices(129), indices(2))
        return [
            store_call(kv, query[:, :1], query[:, :1], slots, device),
            decode_call(query, shared, rows, Scoring(0.1), attended, device),
            *prefill_calls(query, shared, prefills, Scoring(0.1), attended, device),
        ]

    return KernelCase(f"latent {_name(stored)}/{_name(computed)}", calls)


def store(stored: torch.dtype, computed: torch.dtype) -> KernelCase:
    """Return the case of the two kernels that write KV: with rotation and without."""

    def calls(device: Device) -> list[KernelCall]:
        kv, slots = pages(stored, 128).layer(1), indices(256)
        qkv = tensor(256, KV_HEADS * (GROUP + 2), 128, dtype=computed)
        key, value, half = qkv[:, :KV_HEADS], qkv[:, KV_HEADS : 2 * KV_HEADS], tensor(256, 64, dtype=computed)
        norms = HeadNorms(tensor(128, dtype=computed), tensor(128, dtype=computed), 1e-6)
        query = tensor(256, KV_HEADS * GROUP, 128, dtype=computed)
        rotate = rotate_call(qkv, Turning(half, half, slots, norms, slots), kv, query, device)
        return [rotate, store_call(kv, key, value, slots, device)]

    return KernelCase(f"store {_name(stored)}/{_name(computed)}", calls)


def row_by_row(dtype: torch.dtype) -> KernelCase:
    def calls(_: Device) -> list[KernelCall]:
        x, weight = tensor(256, HIDDEN, dtype=dtype), tensor(HIDDEN, dtype=dtype)
        gate_up, gated = tensor(256, 2 * FEED_FORWARD, dtype=dtype), tensor(256, FEED_FORWARD, dtype=dtype)
        plain, added = (norm_call(x, residual, weight, 1e-6, torch.empty_like(x)) for residual in (None, x.clone()))
        return [plain, added, *(gate_call(gate_up, gate, gated) for gate in (Gate.SILU, Gate.SIGMOID))]

    return KernelCase(f"norm, gate {_name(dtype)}", calls)


def delta_net(dtype: torch.dtype) -> KernelCase:
    """Return the case of a DeltaNet layer of Qwen3-Next-80B-A3B, for a step of 64 answers."""

    def calls(_: Device) -> list[KernelCall]:
        key_heads, value_heads, size, kernel = 16, 32, 128, 4
        rows, keys, heads = 64, key_heads * size, value_heads * size
        channels, block = 2 * keys + heads, indices(rows)
        runs = StateRuns(indices(rows + 1), block, block, block, rows, ())
        pages = tensor(BLOCKS, 4 * (heads * size + kernel * channels), dtype=torch.float32)
        matrices = pages[:, : heads * size].unflatten(1, (value_heads, size, size))
        inputs = pages[:, heads * size :][:, : kernel * channels].unflatten(1, (kernel, channels))
        mixed = tensor(rows, channels, dtype=dtype)
        query, key, value = mixed.split((keys, keys, heads), dim=1)
        query, key, value = (each.unflatten(1, (-1, size)) for each in (query, key, value))
        number, of_head = tensor(rows, value_heads, dtype=dtype), tensor(value_heads, dtype=torch.float32)
        made = tensor(rows, value_heads, size, dtype=torch.float32)
        return [
            convolution_call(mixed, tensor(channels, kernel, dtype=dtype), inputs, runs, torch.empty_like(mixed)),
            rule_call(query, key, value, number, number, DeltaRates(of_head, of_head), matrices, runs, made),
        ]

    return KernelCase(f"delta net {_name(dtype)}", calls)


def few_rows(rows: int, stored: torch.dtype, dtype: torch.dtype) -> KernelCase:
    """Return the case of a gated product of normalised rows, and of a product that is added to its output."""

    def calls(device: Device) -> list[KernelCall]:
        data, outputs = tensor(2 * FEED_FORWARD, HIDDEN, dtype=stored), tensor(rows, FEED_FORWARD, dtype=dtype)
        weight = data if stored == dtype else QuantisedWeight(data, tensor(len(data), dtype=torch.float32))
        x, norm, bias = (tensor(*shape, dtype=dtype) for shape in ((rows, HIDDEN), (HIDDEN,), (2 * FEED_FORWARD,)))
        sums = tensor(rows, 2 * FEED_FORWARD, dtype=dtype)
        return [
            fused_call(x, weight, None, norm, 1e-6, Gate.SILU, outputs, device),
            fused_call(x, weight, bias, None, 0.0, None, sums, device, adds=True),
        ]

    return KernelCase(f"few rows {_name(stored)}/{_name(dtype)} x{rows}", calls)


def quantised(data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype) -> KernelCase:
    """Return the case of a quantised weight: few rows (inputs are split), a full tile, dequantisation for more rows."""

    def calls(device: Device) -> list[KernelCall]:
        weight, bias = QuantisedWeight(data, scales, zeros), tensor(len(data), dtype=dtype)
        spelled, found = tensor(weight.outputs, weight.inputs, dtype=dtype), []
        for rows in (4, 64):
            x, output = tensor(rows, weight.inputs, dtype=dtype), tensor(rows, weight.outputs, dtype=dtype)
            found += linear_calls(x, weight, bias, output, device)
        return [*found, dequantise_call(weight, spelled, device)]

    stored = "E2M1" if data.dtype == torch.uint8 and zeros is None else _name(data.dtype)
    return KernelCase(f"linear {stored}/{_name(dtype)}", calls)


def experts(rows: int, stored: torch.dtype, dtype: torch.dtype) -> KernelCase:
    """Return the case of 128 experts, 8 for each row (Qwen3-30B-A3B)."""

    def calls(device: Device) -> list[KernelCall]:
        many, per_row, hidden, inner = 128, 8, 2048, 768
        pairs = SortedPairs(indices(rows * per_row), indices(many + 1))
        found = []
        for inputs, outputs, count in ((hidden, 2 * inner, rows), (inner, hidden, rows * per_row)):
            data = tensor(many * outputs, inputs, dtype=stored)
            plain = data if stored == dtype else QuantisedWeight(data, tensor(len(data), dtype=torch.float32))
            made = tensor(rows * per_row, outputs, dtype=dtype)
            found.append(
                expert_call(tensor(count, inputs, dtype=dtype), ExpertWeight(plain, many), pairs, made, device)
            )
        return found

    return KernelCase(f"experts {_name(stored)}/{_name(dtype)} x{rows}", calls)


def sample(vocab: int, may_ban: bool) -> KernelCase:
    """Return the case of sampling; a vocabulary that fits one tile compiles to a variant of its own."""

    def calls(_: Device) -> list[KernelCall]:
        column = tensor(64, dtype=torch.float32)
        sampled = Sampled(indices(64), column)
        uniform = tensor(64, dtype=torch.float64)
        logits = tensor(64, vocab, dtype=torch.float32)
        return sample_calls(logits, column, indices(64), column, uniform, may_ban, sampled)

    return KernelCase(f"sample of {vocab}{', some banned' if may_ban else ''}", calls)


def copies() -> KernelCase:
    def calls(_: Device) -> list[KernelCall]:
        blocks, piece = tensor(BLOCKS, 1, 1 << 22, dtype=torch.uint8), tensor(64, 1, 1 << 22, dtype=torch.uint8)
        return [copy_call(blocks, indices(64), piece, None, 64), copy_call(piece, None, blocks, indices(64), 64)]

    return KernelCase("gather, scatter", calls)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _said(scoring: Scoring) -> str:
    parts = [name for name in ("window", "softcap", "sinks") if getattr(scoring, name) is not None]
    return "+".join(parts) or "plain"


PLAIN = Scoring(128**-0.5)
SINKS = Scoring(64**-0.5, 128, sinks=tensor(KV_HEADS * GROUP, dtype=torch.float32))
ALL = Scoring(128**-0.5, 1024, 50.0)
PAIRS = [(dtype, dtype) for dtype in FLOATS] + [(dtype, torch.bfloat16) for dtype in QUANTISED]
WEIGHTS = [(dtype, dtype) for dtype in FLOATS] + [
    (dtype, torch.bfloat16) for dtype in (torch.int8, torch.float8_e4m3fn)
]
CASES = [
    *(decode(sequences, *pair, 128, PLAIN) for pair in PAIRS for sequences in (1, 32)),
    *(decode(1, torch.bfloat16, torch.bfloat16, head_dim, PLAIN) for head_dim in (64, 80, 256)),
    decode(1, torch.bfloat16, torch.bfloat16, 128, ALL),
    decode(1, torch.float8_e4m3fn, torch.float32, 128, PLAIN),
    *(rotated(sequences, *pair, 128, PLAIN) for pair in PAIRS for sequences in (1, 32)),
    *(rotated(1, torch.bfloat16, torch.bfloat16, head_dim, PLAIN) for head_dim in (64, 80, 256)),
    *(rotated(1, torch.bfloat16, torch.bfloat16, 128, PLAIN, group) for group in (2, 8, 16)),
    rotated(1, torch.bfloat16, torch.bfloat16, 128, ALL),
    rotated(1, torch.bfloat16, torch.bfloat16, 64, SINKS, 8),
    *(prefill(8192, *pair, 128, PLAIN) for pair in PAIRS),
    *(prefill(8192, torch.bfloat16, torch.bfloat16, head_dim, PLAIN) for head_dim in (64, 256)),
    prefill(8192, torch.bfloat16, torch.bfloat16, 128, ALL),
    prefill(8192, torch.bfloat16, torch.bfloat16, 64, SINKS),
    prefill(5, torch.bfloat16, torch.bfloat16, 128, PLAIN, start=0),
    *(prefill(tokens, torch.bfloat16, torch.bfloat16, 128, PLAIN, start=8192) for tokens in (5, 50)),
    prefill(50, torch.float8_e4m3fn, torch.bfloat16, 128, PLAIN, start=8192),
    *(latent(*pair) for pair in PAIRS),
    *(store(*pair) for pair in PAIRS),
    *(row_by_row(dtype) for dtype in FLOATS),
    *(
        quantised(tensor(HIDDEN, HIDDEN, dtype=stored), tensor(HIDDEN, dtype=torch.float32), None, dtype)
        for stored in (torch.int8, torch.float8_e4m3fn)
        for dtype in FLOATS
    ),
    *(
        quantised(
            tensor(HIDDEN, HIDDEN // 2, dtype=torch.uint8),
            tensor(HIDDEN, HIDDEN // 32, dtype=torch.float16),
            tensor(HIDDEN, HIDDEN // 32, dtype=torch.uint8),
            dtype,
        )
        for dtype in FLOATS
    ),
    quantised(tensor(HIDDEN, HIDDEN // 2, dtype=torch.uint8), tensor(HIDDEN, HIDDEN // 32), None, torch.bfloat16),
    *(delta_net(dtype) for dtype in FLOATS),
    *(few_rows(rows, stored, dtype) for stored, dtype in WEIGHTS for rows in (1, 4)),
    *(experts(rows, torch.bfloat16, torch.bfloat16) for rows in (1, 4096)),
    experts(1, torch.float8_e4m3fn, torch.bfloat16),
    experts(1, torch.float32, torch.float32),
    sample(VOCAB, may_ban=False),
    sample(512, may_ban=True),
    copies(),
]


MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}
MAY_SPILL = "attend_chunk"  # the only kernel that decode does not use


@dataclass(frozen=True, slots=True)
class Compiled:
    case: str
    kernel: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    reads_before_wait: int | None  # global loads before the wait for the previous kernel; None: not all programs wait
    seconds: float  # compilation time on one core

    def __str__(self) -> str:
        return (
            f"sm_{self.arch} {self.case:40} {self.kernel:20} {self.registers:4} registers "
            f"{self.spilled_bytes:6} B spilled {self.shared_bytes:7} B shared {self.seconds:5.1f} s"
        )


def compiled(case: KernelCase, arch: int) -> Iterator[Compiled]:
    """Compile every kernel of a case to cubin, and yield its resources.

    Raises: triton.OutOfResources if a kernel needs more than a GPU has.
    """
    for call in case.calls(Device(arch, MULTIPROCESSORS[arch], overlaps=arch >= 90)):
        started = time.perf_counter()
        with absent_gpu(arch):
            kernel = call.compile()
            took_s = time.perf_counter() - started
            call.start()
        registers, spilled = _resources(kernel.asm["cubin"])
        name, shared, early = kernel.name, kernel.metadata.shared, _reads_before_wait(kernel.asm["ptx"])
        yield Compiled(case.name, name, arch, registers, spilled, shared, early, took_s)


def _reads_before_wait(ptx: str) -> int | None:
    early, wait, _ = ptx.partition("griddepcontrol.wait")
    return None if not wait or re.search(r"\b(bra|ret)\b", early) else len(re.findall(r"ld\.global|cp\.async", early))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the number of registers of a thread, and the bytes of its stack, which holds spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if used is None:
        raise ValueError(f"cuobjdump printed no registers: {said}")
    return int(used[1]), int(used[2])


def compile_cases(arch: int, kernel: str) -> list[Compiled]:
    """Compile the cases whose names contain `kernel` for one architecture.

    Call it once per process: Triton 3.6 keeps the list of 8-bit types of the first architecture.
    """
    rows: list[Compiled] = []
    for case in CASES:
        for row in compiled(case, arch) if kernel in case.name else ():
            print(row, flush=True)
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=sorted(MULTIPROCESSORS))
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    options = parser.parse_args(arguments)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawned, max_tasks_per_child=1) as compilers:
        found = compilers.map(compile_cases, options.arch, itertools.repeat(options.kernel))
        rows = [row for of_arch in found for row in of_arch]
    print(f"{len(rows)} kernels, {sum(row.seconds for row in rows):.0f} s of compiling", flush=True)
    bad = [row for row in rows if row.spilled_bytes and row.kernel != MAY_SPILL]
    verdict = judge_rounds(f"no kernel spills, except {MAY_SPILL}", (row not in bad for row in rows), "kernels")
    kernels = {"kernels": [asdict(row) for row in rows]}
    write_result(options.json, make_result(["kernels/triton"], [kernels], verdict, triton=triton.__version__))
    for row in bad:
        print(f"spills: {row}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
