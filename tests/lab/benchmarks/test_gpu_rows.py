"""lab/benchmarks/gpu.sh on a machine without a GPU: its rows run at tiny sizes."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.norms import rms_norm
from baton.lab.benchmarks.gpu import __main__ as gpu
from baton.lab.benchmarks.gpu import row_processes, run
from baton.lab.benchmarks.gpu.__main__ import WIDTHS, table
from baton.lab.benchmarks.gpu.attention import TOKEN_BYTES, contexts, decode_layers
from baton.lab.benchmarks.gpu.compilations import compilations
from baton.lab.benchmarks.gpu.engine import NANO_VLLM, covered, nano_work
from baton.lab.benchmarks.gpu.processes import DEVICE_LOST
from baton.lab.benchmarks.gpu.row import Bound, Figure, FigureTarget, GpuRow, Setting, at_least, at_most, seconds
from baton.lab.benchmarks.gpu.row_processes import ALL_ROWS, MODULES, run_rows, shared_out
from baton.lab.benchmarks.gpu.run import measured
from baton.lab.benchmarks.triton.absent_gpu import absent_gpu
from baton.lab.benchmarks.triton.nodes import counted_kernels
from baton.launch.paths import ROOT
from tests.fixtures.ended import has_ended

DRY = Setting(torch.device("cpu"), dry=True)
QUICK = ("decode_attention", "prefill_attention", "pages", "step_llama8b", "step_qwen0.6b", "throughput", "hand_over")
"""The others take longer: lab/benchmarks/gpu.sh --dry-run --no-tests runs them too."""
BLOCKED = """
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"redis", "opentelemetry", "pydantic", "typer", "rich"}:
            raise ImportError(f"{name} is not on this machine")
sys.meta_path.insert(0, Blocked())
for module in sys.argv[1:]:
    importlib.import_module(f"baton.lab.benchmarks.gpu.{module}")
"""


def rows_of(module: str) -> tuple[GpuRow, ...]:
    found: tuple[GpuRow, ...] = importlib.import_module(f"baton.lab.benchmarks.gpu.{module}").ROWS
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_row_is_listed(module: str) -> None:
    assert tuple(row.name for row in rows_of(module)) == MODULES[module]


@pytest.mark.parametrize("name", QUICK)
def test_row_runs_to_its_end(name: str) -> None:
    row = next(row for module in MODULES for row in rows_of(module) if row.name == name)
    with torch.inference_mode():
        found = measured(row, DRY)
    assert found["status"] == "measured", found
    assert all(figure["value"] == figure["value"] for figure in found["figures"])


def test_nothing_is_imported_that_a_bare_machine_lacks() -> None:
    command = [sys.executable, "-c", BLOCKED, *MODULES, "run", "__main__"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_absent_reference_of_a_row_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed
    row = next(row for row in rows_of("peers") if row.name == "flashinfer")
    assert measured(row, DRY)["status"] == "absent"


@pytest.mark.parametrize(
    ("target", "met"), [(None, None), (at_least(2), True), (at_least(4), False), (at_most(2), False)]
)
def test_target_is_met_or_not(target: object, met: bool | None) -> None:
    assert Figure("speed", 3.0, "m/s", target).is_met("") is met  # type: ignore[arg-type]


H100, H200, OTHER = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H100 PCIe"


@pytest.mark.parametrize(
    ("target", "device", "met", "said"),
    [
        (at_least(3.6, Bound.MEMORY), H200, False, "at least 3.6"),
        (at_least(3.6, Bound.MEMORY), H100, True, "at least 2.512 (H200 3.6)"),
        (at_least(3.6, Bound.MEMORY), OTHER, None, "at least 3.6 on an H200"),
        (at_least(21000, Bound.MEMORY), H100, False, "at least 14660 (H200 21000)"),
        (at_most(2.5, Bound.MEMORY), H200, False, "at most 2.5"),
        (at_most(2.5, Bound.MEMORY), H100, True, "at most 3.582 (H200 2.5)"),
        (at_least(350, Bound.PRODUCTS), H100, False, "at least 350"),
        (at_least(0.9), OTHER, True, "at least 0.9"),
    ],
)
def test_absolute_target_is_the_one_of_the_gpu_at_hand(
    target: FigureTarget, device: str, met: bool | None, said: str
) -> None:
    found = Figure("speed", 3.0, "TB/s", target).as_dict(device)
    assert len(said) < WIDTHS[4]
    assert (found["met"], found["target"]) == (met, said)


class Device:
    """Imitated CUDA device; calls take six times as long until its clock is raised."""

    def __init__(self, call_ms: float, raised_at_ms: float) -> None:
        self.now_ms, self.call_ms, self.raised_at_ms = 0.0, call_ms, raised_at_ms
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        self.now_ms += self.call_ms * (1 if self.now_ms >= self.raised_at_ms else 6)

    def event(self, enable_timing: bool) -> "Mark":
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = self._device.now_ms

    def elapsed_time(self, later: "Mark") -> float:
        return later.at_ms - self.at_ms


@pytest.mark.parametrize(("call_ms", "least_ms", "least_calls"), [(1.0, 50 + 50, 0), (200.0, 0, 1 + 10)])
def test_measurement_runs_long_enough_on_a_warm_device(
    call_ms: float, least_ms: float, least_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(call_ms, raised_at_ms=45)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert seconds(device.call, Setting(torch.device("cuda"), dry=False)) == call_ms / 1e3
    assert device.now_ms >= least_ms
    assert device.calls >= least_calls


def test_table_names_rows_that_were_missed_and_rows_that_did_not_end(tmp_path: Path) -> None:
    figure = Figure("32 x 4096", 3.456789, "TB/s", at_least(3.6), "copy 4.3 TB/s").as_dict("")
    (tmp_path / "one.json").write_text(json.dumps({"status": "measured", "figures": [figure]}))
    (tmp_path / "two.json").write_text(json.dumps({"status": "failed", "reason": "out of luck"}))
    _, one, two, three = table(tmp_path, ["one", "two", "three"]).splitlines()
    assert one.split() == ["one", "32", "x", "4096", "3.457", "TB/s", "at", "least", "3.6", "NO", "copy", "4.3", "TB/s"]
    assert two.split() == ["two", "failed:", "out", "of", "luck"]
    assert three.split() == ["three", "did", "not", "finish"]


ROWS_OF_A_KIND = """
import pathlib, sys, time
for row in sys.argv[2].split(","):
    if row == "hangs":
        time.sleep(60)
    if row == "dies":
        sys.exit(7)
    if row == "breaks":
        (pathlib.Path(sys.argv[1]) / f"{row}.json").write_text('{"status": "failed"}')
        sys.exit(75)
    (pathlib.Path(sys.argv[1]) / f"{row}.json").write_text('{"status": "measured"}')
"""


def starter(out: Path, started: list[list[str]]) -> Callable[[Sequence[str]], "subprocess.Popen[bytes]"]:
    """Return a function that starts a process for rows, and appends these rows to `started`."""

    def start(rows: Sequence[str]) -> "subprocess.Popen[bytes]":
        started.append(list(rows))
        command = [sys.executable, "-c", ROWS_OF_A_KIND, str(out), ",".join(rows)]
        return subprocess.Popen(command, start_new_session=True)

    return start


def test_row_that_hangs_or_dies_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_processes.ROW_S, "hangs", 0.3)
    started: list[list[str]] = []
    rows = ["first", "hangs", "second", "dies", "third"]
    assert run_rows(starter(tmp_path, started), rows, tmp_path, time.monotonic() + 30) == 1
    assert started[1:] == [["second", "dies", "third"], ["third"]]
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {row for row, each in found.items() if each["status"] == "measured"} == {"first", "second", "third"}
    assert (found["hangs"]["reason"], found["dies"]["reason"]) == ("timed out", "its process exited with 7")


def test_row_that_breaks_the_device_fails_alone(tmp_path: Path) -> None:
    started: list[list[str]] = []
    rows = ["first", "breaks", "second", "third"]
    assert run_rows(starter(tmp_path, started), rows, tmp_path, time.monotonic() + 30) == 1
    assert started == [["first", "breaks", "second", "third"], ["second", "third"]]
    status = {path.stem: json.loads(path.read_text())["status"] for path in tmp_path.iterdir()}
    assert status == {"first": "measured", "breaks": "failed", "second": "measured", "third": "measured"}


def test_process_ends_after_a_row_that_broke_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "settled", lambda device: False)
    arguments = ["attention", "--rows", "decode_attention,pages", "--out", str(tmp_path), "--dry-run"]
    assert run.main(arguments) == DEVICE_LOST
    assert [path.name for path in tmp_path.iterdir()] == ["decode_attention.json"]


STARTS_A_ROW = """
import os, pathlib, signal, subprocess, sys
from baton.lab.benchmarks.gpu import __main__ as gpu
from baton.lab.benchmarks.gpu.processes import end_by_signals
def hang(rows):
    command = ["sh", "-c", 'sleep 600 & echo $! > "$0.part"; mv "$0.part" "$0"; wait', sys.argv[1]]
    process = subprocess.Popen(command, start_new_session=True)
    while not pathlib.Path(sys.argv[1]).exists():
        pass
    if sys.argv[3] == "begun":
        os.kill(os.getpid(), signal.SIGTERM)
    return process
gpu.starting = lambda *_: hang
end_by_signals()
gpu.main(["--no-tests", "--rows", "pages,hand_over", "--out", sys.argv[2]])
"""


@pytest.mark.parametrize("comes", ["begun", "later"])
def test_row_ends_with_all_that_it_started_where_a_signal_ends_measuring(comes: str, tmp_path: Path) -> None:
    """The signal may come before the row's process has started."""
    note = tmp_path / "pid"
    command = [sys.executable, "-c", STARTS_A_ROW, str(note), str(tmp_path / "out"), comes]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as measuring:
        while not note.exists():
            assert measuring.poll() is None
        if comes == "later":
            measuring.terminate()
        said, _ = measuring.communicate(timeout=30)
    assert measuring.returncode == 128 + signal.SIGTERM
    assert "hand_over         did not finish" in said
    end = time.monotonic() + 30
    while not has_ended(int(note.read_text())):
        assert time.monotonic() < end, "a process that the row started is still there"


@pytest.mark.parametrize(("sequences", "tokens"), [(32, 4096), (1, 8192)])
def test_decode_is_measured_over_layers_that_no_cache_holds(sequences: int, tokens: int) -> None:
    layers, layer_bytes = decode_layers(sequences, tokens), sequences * tokens * TOKEN_BYTES
    assert layers >= 4
    assert 1 << 30 <= layers * layer_bytes <= 4 << 30


def test_decode_of_a_layer_is_one_kernel_as_in_a_recorded_step() -> None:
    asked = contexts(1, 1024, 2, Setting(torch.device("cpu"), dry=False))
    with counted_kernels() as counts:
        asked.decode(0)
        asked.decode(1)
    assert counts == {"attend_part": 2}


def test_kernels_that_are_compiled_while_something_runs_are_named() -> None:
    row, weight = torch.ones(1, 64), torch.ones(64)
    with on_the_interpreter(), absent_gpu(90, number=7000):  # an architecture for which nothing is compiled yet
        with compilations() as warming:
            rms_norm(row, weight, 1e-5)
        with compilations() as later:
            rms_norm(row, weight, 1e-5)
        with compilations() as wider:
            rms_norm(torch.ones(1, 128), torch.ones(128), 1e-5)
        rms_norm(torch.ones(1, 256), torch.ones(256), 1e-5)
    assert (warming, later, wider) == (["normalise"], [], ["normalise"])


def test_throughput_is_that_of_nano_vllms_requests() -> None:
    work = nano_work(*NANO_VLLM)
    assert (sum(map(len, work.prompts)), sum(work.answer_tokens)) == (142_827, 133_966)


def test_device_is_busy_where_any_work_covers_the_time() -> None:
    assert covered([]) == 0
    assert covered([(3, 4), (0, 2), (1, 2.5), (3.5, 3.75)]) == 3.5


TOLD_TO_END = """
import signal, sys, time
def unwind(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("unwound", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, unwind)
print("begun", flush=True)
while True:  # a signal that arrives just before signal.pause() would not end it
    time.sleep(0.1)
"""


def script(tmp_path: Path, python: str, within: str = "/bin/sh", **environment: str) -> "subprocess.Popen[str]":
    """Run gpu.sh with another program instead of Python, and `tmp_path`/rows for its results."""
    program = tmp_path / "python"
    program.write_text(f"#!{within}\n{python}\n")
    program.chmod(0o755)
    return subprocess.Popen(
        [ROOT / "lab" / "benchmarks" / "gpu.sh", "--rows", "pages", "--out", tmp_path / "rows"],
        env={"PATH": os.environ["PATH"], "PYTHON": str(program), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def archived(out: Path) -> list[str]:
    with tarfile.open(f"{out}.tar.gz") as archive:
        return archive.getnames()


def test_script_finds_the_package_and_keeps_a_log_and_an_archive(tmp_path: Path) -> None:
    running = script(tmp_path, 'echo "path $PYTHONPATH, arguments $*"; exit 3')
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 3, said
    assert f"path {ROOT / 'src'}:{ROOT}," in said
    assert (tmp_path / "rows" / "log.txt").read_text() == said
    assert "./log.txt" in archived(tmp_path / "rows")


def test_products_in_float32_are_not_in_tf32(tmp_path: Path) -> None:
    switches = {"NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    said, _ = script(tmp_path, "env", **switches).communicate(timeout=30)
    assert "PYTHONUNBUFFERED=1" in said
    assert "TF32" not in said


@pytest.mark.parametrize("whole_group", [False, True])
def test_script_keeps_its_archive_on_sigterm(tmp_path: Path, whole_group: bool) -> None:
    with script(tmp_path, TOLD_TO_END, within=sys.executable) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        (os.killpg if whole_group else os.kill)(running.pid, signal.SIGTERM)
        running.communicate(timeout=30)
    assert running.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "rows" / "log.txt").read_text() == "begun\nunwound\n"
    assert "./log.txt" in archived(tmp_path / "rows")


def test_rows_that_no_time_is_left_for_say_so(tmp_path: Path) -> None:
    def start(rows: Sequence[str]) -> "subprocess.Popen[bytes]":
        raise AssertionError(f"{rows} begin without time")

    assert run_rows(start, ["late"], tmp_path, time.monotonic() + 1) == 0
    assert json.loads((tmp_path / "late.json").read_text())["status"] == "absent"


def test_all_rows_together_may_take_no_longer_than_ten_minutes() -> None:
    assert gpu.TOTAL_S + 2 * row_processes.EXIT_S < 600
    each_s = (row_processes.ROW_S.get(row, row_processes.OTHER_ROW_S) for row in row_processes.ALL_ROWS)
    assert sum(each_s) <= 1.3 * gpu.TOTAL_S


def test_profiled_row_slows_no_other() -> None:
    """A profiler stays attached to its process, so the row runs in its own."""
    engine = [rows for module, rows in shared_out(ALL_ROWS) if module == "engine"]
    assert engine == [["throughput"], ["step_qwen0.6b"], ["step_llama8b"]]
    assert list(shared_out({"pages", "step_llama8b", "decode_attention"})) == [
        ("attention", ["decode_attention", "pages"]),
        ("engine", ["step_llama8b"]),
    ]
