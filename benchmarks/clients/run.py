"""Each client in a virtual environment of its own, from `requirements/NAME.txt`."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parent / "requirements"


def program(folder: Path, name: str, command: str) -> Path:
    """Path of a command of the client's; its environment in `folder` is made where there is none.

    Raises: CalledProcessError.
    """
    environment = folder / name
    marker = environment / "installed"
    if not marker.exists():
        print(f"installing {name} into {environment}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", str(REQUIREMENTS / f"{name}.txt")], check=True)
        marker.touch()
    return environment / "bin" / command


@dataclass(frozen=True, slots=True)
class Run:
    url: str  # of the service, without /v1
    model: str  # its name there
    model_folder: Path  # with tokenizer and weights
    environments: Path
    results: Path  # an empty folder
    seconds: float  # of load, where a client takes a time
    pids: Mapping[str, int] = field(default_factory=dict)  # of the service's processes; none where it runs elsewhere

    def client(self, command: list[str], timeout_s: float, **environment: str) -> str:
        """What the client printed. Raises: CalledProcessError, TimeoutExpired."""
        done = subprocess.run(
            command,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            cwd=self.results,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        (self.results / "output.txt").write_text(done.stdout)
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        models: dict[str, Any] = json.load(answer)
    name: str = models["data"][0]["id"]
    return name
