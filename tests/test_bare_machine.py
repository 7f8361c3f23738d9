"""Workers on a machine that has no more than CUDA images of PyTorch have: they start there, and read the same flags."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fixtures.bare_machine import read_both_roles

ROOT = Path(__file__).parents[1]
MODULES = (
    "baton.prefill_worker.role",
    "baton.decode_worker.role",
    "baton.worker.transfer.rank",
    "baton.engine.parallel.rank_process",
)
NEEDED = ["--worker-id", "a-1", "--model", "folder"]
FLAGS: list[list[str]] = [
    NEEDED,
    [*NEEDED, "--port", "7000", "--host", "::1", "--cores", "0,2-3", "--transfer-cores", "1", "--lease-s", "2.5"],
    [*NEEDED, "--kv-memory", "512MiB", "--no-graphs", "--device", "cuda:1", "--adapter", "a=b", "--adapter", "c=d"],
    [*NEEDED, "--kv-memory", "auto", "--max-model-len", "128", "--transport", "nccl", "--transfer-interface", "eth0"],
    [*NEEDED, "--kv-memory", "1.5gb", "--redis-url", "redis://h:1", "--log-format", "json"],
    [],
    ["--worker-id", "no blanks", "--model", "folder"],
    [*NEEDED, "--port", "70000"],
    [*NEEDED, "--port", "many"],
    [*NEEDED, "--kv-memory", "0"],
    [*NEEDED, "--kv-memory", "lots"],
    [*NEEDED, "--cores", "x"],
    [*NEEDED, "--dtype", "float8"],
    [*NEEDED, "--device", "tpu"],
    [*NEEDED, "--gpu-memory-utilization", "1.1"],
    [*NEEDED, "--transport", "nccl"],
    [*NEEDED, "--adapter", "model=folder"],
    [*NEEDED, "--unknown", "1"],
]


def test_workers_import_and_read_their_flags_without_what_a_bare_image_lacks() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.bare_machine", *MODULES],
        input=json.dumps(FLAGS),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,  # to import torch on a busy machine
        check=False,
    )
    assert run.returncode == 0, run.stderr
    plain, expected = json.loads(run.stdout), read_both_roles(FLAGS)
    assert [one for one, other in zip(plain, expected, strict=True) if one != other] == []
    assert sum("worker_id" in each for each in expected) == 2 * 5
