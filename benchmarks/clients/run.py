"""What all of these runs have: where the service is, which model it serves, where environments and results lie."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
