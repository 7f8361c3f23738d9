"""The command line of a benchmark, and its result in a file, which begins with date, machine and versions.

Names no host and no path.
"""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Its help is the benchmark's own description; `--json FILE` is for `write_result`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    return parser


def write_result(path: Path | None, figures: Mapping[str, Any]) -> None:
    """None: nowhere."""
    if path is not None:
        path.write_text(json.dumps({"machine": describe_machine(), **figures}, indent=2) + "\n")


def describe_machine() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "torch_threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
