"""Facts of the machine and the installation that decide whether and how fast Baton runs."""

import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

from baton.cli.installed import installed, output_of

_GPU_FIELDS = "name,driver_version,memory.total,memory.used,utilization.gpu,pstate,ecc.mode.current,mig.mode.current"
_FILES = (
    "/proc/loadavg", "/proc/uptime", "/proc/sys/kernel/sched_autogroup_enabled", "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/vm/swappiness", "/proc/sys/vm/overcommit_memory", "/proc/self/limits", "/proc/meminfo",
    "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io", "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/memory.max", "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
)  # fmt: skip


def describe_machine() -> dict[str, object]:
    """Return versions, CPU, memory, limits, disks and GPUs; None for facts that this machine does not have."""
    on_gpu = shutil.which("nvidia-smi") is not None
    return {
        "python": sys.version.split()[0],
        "libc": " ".join(platform.libc_ver()),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "compiler": (output_of(["c++", "--version"]) or "").partition("\n")[0] or None,
        **asdict(installed(sorted({each.name for each in distributions()}))),
        "first_core": (_text_of("/proc/cpuinfo") or "").partition("\n\n")[0],
        "cores_allowed": sorted(os.sched_getaffinity(0)),
        "cores_online": os.cpu_count(),
        "disks": {place: _free_bytes(place) for place in ("/dev/shm", "/tmp")},
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "gpus": output_of(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv"]) if on_gpu else None,
        "gpu_topology": output_of(["nvidia-smi", "topo", "-m"]) if on_gpu else None,
        **{path: _text_of(path) for path in _FILES},
    }


def _free_bytes(place: str) -> int | None:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _text_of(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
