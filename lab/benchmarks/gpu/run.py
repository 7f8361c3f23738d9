"""Measure rows of one module in this process, so that a broken device context affects no other module.

.venv/bin/python -m baton.lab.benchmarks.gpu.run MODULE --rows NAME,NAME --out FOLDER [--dry-run]
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.cli.installed import installed
from baton.lab.benchmarks.gpu.processes import DEVICE_LOST
from baton.lab.benchmarks.gpu.row import AbsentError, GpuRow, Setting
from baton.lab.report.result import describe_machine


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def describe_gpu(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    import triton

    cuda = str(torch.version.cuda)
    return {"gpu": gpu_name(device), "driver": driver.stdout.strip(), "cuda": cuda, "triton": triton.__version__}


def measured(row: GpuRow, setting: Setting) -> dict[str, Any]:
    """Measure a row; return its status with figures or a reason."""
    started = time.monotonic()
    try:
        figures = row.measure(setting)
    except AbsentError as absent:
        found: dict[str, Any] = {"status": "absent", "reason": str(absent)}
    except Exception as error:  # noqa: BLE001 -- the other rows are still measured
        traceback.print_exc()
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    else:
        found = {"status": "measured", "figures": [figure.as_dict(gpu_name(setting.device)) for figure in figures]}
    return {"row": row.name, **found, "seconds": time.monotonic() - started}


def settled(device: torch.device) -> bool:
    """Release the unused memory of a row, and return whether the device still works."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            traceback.print_exc()
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("--rows", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    setting = Setting(torch.device("cpu" if options.dry_run else "cuda:0"), options.dry_run)
    commit, machine = installed(()).commit, {**describe_machine(), **describe_gpu(setting.device)}
    rows: Sequence[GpuRow] = importlib.import_module(f"baton.lab.benchmarks.gpu.{options.module}").ROWS
    wanted = options.rows.split(",")
    failed = 0
    for row in rows:
        if row.name in wanted:
            found = measured(row, setting)
            failed += found["status"] == "failed"
            report = {
                **found,
                "commit": commit,
                "machine": machine,
                "command": "lab/benchmarks/gpu.sh",
                "dry_run": setting.dry,
            }
            written = options.out / f"{row.name}.part"
            written.write_text(json.dumps(report, indent=1) + "\n")
            written.replace(options.out / f"{row.name}.json")  # atomically, for readers that wait for the file
            if not settled(setting.device):
                return DEVICE_LOST
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
