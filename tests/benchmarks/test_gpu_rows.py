"""benchmarks/gpu.sh on a machine without a GPU: its rows run at sizes of nothing, importing little."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import MODULES, ROOT, table
from benchmarks.gpu.row import Figure, Row, Setting, at_least, at_most
from benchmarks.gpu.run import measured

DRY = Setting(torch.device("cpu"), dry=True)
QUICK = ("decode_attention", "prefill_attention", "pages", "step_llama8b", "step_qwen0.6b", "throughput", "hand_over")
"""The others take longer: benchmarks/gpu.sh --dry-run --no-tests runs them too."""
BLOCKED = """
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"redis", "opentelemetry", "pydantic", "typer", "rich"}:
            raise ImportError(f"{name} is not on this machine")
sys.meta_path.insert(0, Blocked())
for module in sys.argv[1:]:
    importlib.import_module(f"benchmarks.gpu.{module}")
"""


def rows_of(module: str) -> tuple[Row, ...]:
    found: tuple[Row, ...] = importlib.import_module(f"benchmarks.gpu.{module}").ROWS
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_row_is_listed(module: str) -> None:
    assert tuple(row.name for row in rows_of(module)) == MODULES[module]


@pytest.mark.parametrize("name", QUICK)
def test_a_row_runs_to_its_end(name: str) -> None:
    row = next(row for module in MODULES for row in rows_of(module) if row.name == name)
    with torch.inference_mode():
        found = measured(row, DRY)
    assert found["status"] == "measured", found
    assert all(figure["value"] == figure["value"] for figure in found["figures"])


def test_nothing_is_imported_that_a_bare_machine_lacks() -> None:
    command = [sys.executable, "-c", BLOCKED, *MODULES, "run", "__main__"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def test_what_a_row_is_measured_against_may_be_absent() -> None:
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("it is here")
    [row] = rows_of("flashinfer")
    assert measured(row, DRY)["status"] == "absent"


@pytest.mark.parametrize(
    ("target", "met"), [(None, None), (at_least(2), True), (at_least(4), False), (at_most(2), False)]
)
def test_a_target_is_met_or_not(target: object, met: bool | None) -> None:
    assert Figure("speed", 3.0, "m/s", target).is_met is met  # type: ignore[arg-type]


def test_the_table_names_rows_that_were_missed_and_rows_that_did_not_end(tmp_path: Path) -> None:
    figure = Figure("32 x 4096", 3.456789, "TB/s", at_least(3.6), "copy 4.3 TB/s").as_dict()
    (tmp_path / "one.json").write_text(json.dumps({"status": "measured", "figures": [figure]}))
    (tmp_path / "two.json").write_text(json.dumps({"status": "failed", "reason": "out of luck"}))
    _, one, two, three = table(tmp_path, ["one", "two", "three"]).splitlines()
    assert one.split() == ["one", "32", "x", "4096", "3.457", "TB/s", "at", "least", "3.6", "NO", "copy", "4.3", "TB/s"]
    assert two.split() == ["two", "failed:", "out", "of", "luck"]
    assert three.split() == ["three", "did", "not", "end"]
