"""Engines of `./baton bench peers`, each in its own process and virtual environment.

A process converts and loads the model once, measures one round per request, and is stopped in between.
"""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from baton import child_environment
from baton.lab.benchmarks.peers.lines import RoundWork
from baton.launch.paths import ROOT

OURS = "Baton"
LOADING_S, ROUND_S, ENDING_S, CONVERSION_S = 900.0, 900.0, 5.0, 1800.0
ERROR_LINES = 3
CHILD = ROOT / "launch" / "child.py"


class Precision(StrEnum):
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class CheckpointForm(StrEnum):
    """Format that an engine reads. For formats other than CHECKPOINT, the checkpoint is converted once."""

    CHECKPOINT = "checkpoint"
    GGUF = "gguf"
    OPENVINO = "openvino"


@dataclass(frozen=True, slots=True)
class PeerEngine:
    name: str
    driver: str  # key of DRIVERS in drivers.py
    environment: str | None  # folder of its virtual environment; None: this process's
    form: CheckpointForm
    precisions: tuple[Precision, ...]


PEERS = (
    PeerEngine(OURS, "baton", None, CheckpointForm.CHECKPOINT, tuple(Precision)),
    PeerEngine("OpenVINO", "openvino", "openvino", CheckpointForm.OPENVINO, tuple(Precision)),
    PeerEngine("vLLM", "vllm", "vllm", CheckpointForm.CHECKPOINT, (Precision.BF16,)),
    PeerEngine("llama.cpp", "llamacpp", "llamacpp", CheckpointForm.GGUF, tuple(Precision)),
    PeerEngine("ik_llama.cpp", "ik_llamacpp", "ik_llamacpp", CheckpointForm.GGUF, tuple(Precision)),
    PeerEngine("transformers", "transformers", "transformers", CheckpointForm.CHECKPOINT, (Precision.BF16,)),
)
GGUF_TYPES = {Precision.BF16: "bf16", Precision.INT8: "q8_0", Precision.INT4: "q4_0"}
OPENVINO_FORMATS = {Precision.BF16: "fp16", Precision.INT8: "int8", Precision.INT4: "int4"}
OPENVINO_GROUP = 64  # int4 inputs per scale; the default of 128 does not divide the rows of some models


def find_python(peer: PeerEngine, folder: Path, ours: str) -> str | None:
    """Return the peer's interpreter; None if it is not installed. `ours`: the interpreter of this process."""
    if peer.environment is None:
        return ours
    python = folder / peer.environment / "bin" / "python"
    return str(python) if python.exists() else None


def converted_path(peer: PeerEngine, precision: Precision, checkpoint: Path, folder: Path) -> Path:
    """Return the path of the checkpoint in the peer's format; the file may not exist yet.

    A model that is a GGUF file is given to peers that read GGUF as it is, whatever the precision.
    """
    if peer.form is CheckpointForm.CHECKPOINT:
        return checkpoint
    stored = sorted(checkpoint.glob("*.gguf"))
    if peer.form is CheckpointForm.GGUF and stored:
        return stored[0]
    stem = f"{checkpoint.name}-{_fingerprint(checkpoint)}"
    if peer.form is CheckpointForm.GGUF:
        return folder / "converted" / f"{stem}-{GGUF_TYPES[precision]}.gguf"
    return folder / "converted" / f"{stem}-openvino-{OPENVINO_FORMATS[precision]}"


def conversion_command(
    peer: PeerEngine, precision: Precision, python: str, checkpoint: Path, output: Path
) -> list[str]:
    """Return the command that converts the checkpoint to `output`, in the virtual environment of the peer."""
    if peer.form is CheckpointForm.GGUF:
        converter = ["-m", "baton.lab.benchmarks.peers.to_gguf"]
        return [python, *converter, str(checkpoint), str(output), GGUF_TYPES[precision]]
    exporter = str(Path(python).parent / "optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", OPENVINO_FORMATS[precision]]
    group = ["--group-size", str(OPENVINO_GROUP)] if precision is Precision.INT4 else []
    return [exporter, "export", "openvino", "-m", str(checkpoint), *task, *group, str(output)]


def _fingerprint(checkpoint: Path) -> str:
    """Return a fingerprint of a checkpoint: its configuration, and sizes and modification times of its weights."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:8]


class PeerEngineFailed(Exception):
    """Error: the peer failed to load, exited or timed out; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    prefill_s: float
    decode_step_s: float  # median step of the round
    first_tokens: tuple[int, ...]


class PeerProcess:
    """Process group of a peer, stopped except during `measure`, since idle threads of some engines spin."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], cores: Sequence[int], log: Path) -> None:
        """Start the process and wait until it has loaded. Raises: PeerEngineFailed."""
        self._log = log
        dying_with_us = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), ",".join(map(str, cores))]
        with log.open("wb") as stderr:
            try:
                self._process = subprocess.Popen(
                    [*dying_with_us, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd=ROOT,
                    env={**child_environment(), **environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerEngineFailed(str(error)) from error
        self._unread = b""
        with ExitStack() as unless_it_loads:
            unless_it_loads.callback(self.close)
            self.version = str(self._answer(LOADING_S)["version"])
            self._signal(signal.SIGSTOP)
            unless_it_loads.pop_all()

    def measure(self, work: RoundWork, limit_s: float = ROUND_S) -> MeasuredRound:
        """Measure one round. Raises: PeerEngineFailed."""
        self._signal(signal.SIGCONT)
        stdin = self._process.stdin
        if stdin is None:
            raise PeerEngineFailed("the standard input of its process is closed")
        try:
            stdin.write(json.dumps(asdict(work)).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise PeerEngineFailed(self._told("ended")) from error
        answer = self._answer(limit_s)
        self._signal(signal.SIGSTOP)
        return MeasuredRound(answer["prefill_s"], answer["decode_step_s"], tuple(answer["first_tokens"]))

    def close(self) -> None:
        """Kill the process group."""
        self._signal(signal.SIGKILL)
        self._process.wait(ENDING_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise PeerEngineFailed("the standard output of its process is closed")
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerEngineFailed(self._told(f"no answer within {limit_s:.0f} s"))
            got = os.read(stdout.fileno(), 1 << 16)
            if not got:
                raise PeerEngineFailed(self._told("ended"))
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerEngineFailed(self._told(f"answered {line[:80]!r}")) from error
        if not isinstance(answer, dict):
            raise PeerEngineFailed(self._told(f"answered {line[:80]!r}"))
        return answer

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:  # exited; reported when its answer is read
            return

    def _told(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return ": ".join([what, *deque((line.strip() for line in lines if line.strip()), maxlen=ERROR_LINES)])


@dataclass(frozen=True, slots=True)
class Room:
    """Model and largest work that an engine is created for."""

    checkpoint: Path
    folder: Path  # folder of the environments and converted checkpoints
    logs: Path
    threads: int
    batch: int  # maximum number of concurrent sequences
    tokens: int  # maximum length of a sequence


def start_peer(
    peer: PeerEngine, precision: Precision, python: str, room: Room, note: Callable[[str], None]
) -> PeerProcess:
    """Start a peer. Raises: PeerEngineFailed."""
    source = _converted(peer, precision, python, room, note)
    note(f"loading {peer.name} {precision}")
    sizes = map(str, (room.threads, precision, room.batch, room.tokens))
    return PeerProcess(
        [python, "-m", "baton.lab.benchmarks.peers.drivers", peer.driver, str(source), *sizes],
        {"OMP_NUM_THREADS": str(room.threads), "HF_HUB_OFFLINE": "1"},
        sorted(os.sched_getaffinity(0))[: room.threads],
        room.logs / f"{peer.name}-{precision}.log",
    )


def _converted(peer: PeerEngine, precision: Precision, python: str, room: Room, note: Callable[[str], None]) -> Path:
    """Convert the checkpoint if needed. Raises: PeerEngineFailed."""
    output = converted_path(peer, precision, room.checkpoint, room.folder)
    if peer.form is CheckpointForm.CHECKPOINT or output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"partial-{output.name}")
    note(f"converting {room.checkpoint.name} for {peer.name} {precision}")
    command = conversion_command(peer, precision, python, room.checkpoint, partial)
    environment = {**child_environment(), "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=CONVERSION_S)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-ERROR_LINES:]
        raise PeerEngineFailed(": ".join(["its converter failed", *last])) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerEngineFailed(str(error)) from error
    return partial.rename(output)
