"""Compiles the Triton kernels ahead of time, without a GPU, and says what ptxas made of them.

    .venv/bin/python -m baton.benchmarks.triton.compile --arch 80 90 100 [--kernel paged_decode] [--json FILE]

One line per kernel and dtype: registers, bytes spilled, shared memory. Exit status 1 where decode attention spills.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.benchmarks.report.result import make_parser, write_result
from baton.benchmarks.triton.calls import CASES, Case
from baton.kernels.triton.call import KernelCall
from baton.kernels.triton.launch import Device

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
NEVER_SPILLS = ("attend_part", "combine_parts")
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    case: str
    kernel: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    seconds: float  # to compile it, on one core

    def __str__(self) -> str:
        return (
            f"sm_{self.arch} {self.case:40} {self.kernel:20} {self.registers:4} registers "
            f"{self.spilled_bytes:6} B spilled {self.shared_bytes:7} B shared {self.seconds:5.1f} s"
        )


def compiled(case: Case, arch: int) -> Iterator[Compiled]:
    """Every kernel that the case starts, to cubin."""
    for call in case.calls(Device(arch, MULTIPROCESSORS[arch])):
        started = time.perf_counter()
        binary = triton.compile(
            _source(call),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": call.warps, "num_stages": call.stages},
        )
        took_s = time.perf_counter() - started
        registers, spilled = _resources(binary.asm["ptx"], arch)
        yield Compiled(case.name, binary.metadata.name, arch, registers, spilled, binary.metadata.shared, took_s)


def _source(call: KernelCall) -> ASTSource:
    """Specialised as the launch of these arguments would be."""
    kernel: Any = call.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value, specialised = call.arguments[parameter.name], not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialised:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers per thread and bytes spilled to memory, as `ptxas -v` says."""
    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise ValueError("PTX without a target")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    if used is None:
        raise ValueError(f"ptxas did not say how many registers it used: {said}")
    return int(used[1]), sum(spills)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(MULTIPROCESSORS), choices=sorted(MULTIPROCESSORS))
    parser.add_argument("--kernel", default="", help="only cases whose name has this in it")
    options = parser.parse_args(arguments)
    rows: list[Compiled] = []
    for case in CASES:
        for arch in options.arch if options.kernel in case.name else ():
            for row in compiled(case, arch):
                print(row, flush=True)
                rows.append(row)
    print(f"{len(rows)} kernels, {sum(row.seconds for row in rows):.0f} s of compiling", flush=True)
    write_result(options.json, {"triton": triton.__version__, "rows": [asdict(row) for row in rows]})
    bad = [row for row in rows if row.spilled_bytes and row.kernel in NEVER_SPILLS]
    for row in bad:
        print(f"spills: {row}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
