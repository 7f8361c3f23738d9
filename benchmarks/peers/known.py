"""The engines that `./baton bench peers` knows: the form that each reads, and the environment it runs in."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

OURS = "Baton"


class Precision(StrEnum):
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Form(StrEnum):
    """The form of a checkpoint that an engine reads; all but the first are converted, once."""

    CHECKPOINT = "checkpoint"
    GGUF = "gguf"
    OPENVINO = "openvino"


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    driver: str  # module that speaks benchmarks/peers/lines.py
    environment: str | None  # folder of its virtual environment; None: ours
    form: Form
    precisions: tuple[Precision, ...]


PEERS = (
    Peer(OURS, "run_baton", None, Form.CHECKPOINT, tuple(Precision)),
    Peer("OpenVINO", "run_openvino", "openvino", Form.OPENVINO, tuple(Precision)),
    Peer("vLLM", "run_vllm", "vllm", Form.CHECKPOINT, (Precision.BF16,)),
    Peer("llama.cpp", "run_llamacpp", "llamacpp", Form.GGUF, tuple(Precision)),
    Peer("transformers", "run_transformers", "transformers", Form.CHECKPOINT, (Precision.BF16,)),
)
GGUF_TYPES = {Precision.BF16: "bf16", Precision.INT8: "q8_0", Precision.INT4: "q4_0"}
OPENVINO_FORMATS = {Precision.BF16: "fp16", Precision.INT8: "int8", Precision.INT4: "int4"}
OPENVINO_GROUP = 64  # inputs of int4 that share a scale: its default, 128, divides fewer models' rows


def find_python(peer: Peer, folder: Path, ours: str) -> str | None:
    """Its interpreter; None where it is not installed. `ours`: the one that this runs on."""
    if peer.environment is None:
        return ours
    python = folder / peer.environment / "bin" / "python"
    return str(python) if python.exists() else None


def converted_path(peer: Peer, precision: Precision, checkpoint: Path, folder: Path) -> Path:
    """Where its form of the checkpoint is, or is to be written."""
    if peer.form is Form.CHECKPOINT:
        return checkpoint
    stem = f"{checkpoint.name}-{_fingerprint(checkpoint)}"
    if peer.form is Form.GGUF:
        return folder / "converted" / f"{stem}-{GGUF_TYPES[precision]}.gguf"
    return folder / "converted" / f"{stem}-openvino-{OPENVINO_FORMATS[precision]}"


def conversion_command(peer: Peer, precision: Precision, python: str, checkpoint: Path, output: Path) -> list[str]:
    """That writes `output`; the environment is the peer's own. Only for forms that are converted."""
    if peer.form is Form.GGUF:
        converter = ["-m", "baton.benchmarks.peers.to_gguf"]
        return [python, *converter, str(checkpoint), str(output), GGUF_TYPES[precision]]
    exporter = str(Path(python).parent / "optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", OPENVINO_FORMATS[precision]]
    group = ["--group-size", str(OPENVINO_GROUP)] if precision is Precision.INT4 else []
    return [exporter, "export", "openvino", "-m", str(checkpoint), *task, *group, str(output)]


def _fingerprint(checkpoint: Path) -> str:
    """Of the configuration, and of sizes and times of the weights: changes when the checkpoint does."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:8]
