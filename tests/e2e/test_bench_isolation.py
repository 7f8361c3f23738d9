"""`baton bench isolation` runs on a tiny model for a few seconds; the figures are not checked."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import REPOSITORY
from tests.e2e.stack import SILENCE_S
from tests.fixtures.checkpoints import make_checkpoint

# The answers are so long that they still run at the end, even on a fast machine.
LOAD = ("--answers", "2", "--prompt-tokens", "200", "--answer-tokens", "12000")
FLAGS = ("--rounds", "1", "--seconds", "1.5", "--variants", "1p1d", *LOAD)
UP_FLAGS = "--kv-memory 128MiB"


def test_every_phase_of_one_round_has_its_figures(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny-long", "llama", seed=11, max_position_embeddings=16384)
    command = [sys.executable, "-m", "baton.cli", "bench", "isolation", "--model", str(model), *FLAGS]
    picture = tmp_path / "isolation.svg"
    command += ["--up-flags", UP_FLAGS, "--picture", str(picture), "--json"]
    patient = {**os.environ, "BATON_SESSION_SILENCE_S": SILENCE_S}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY, env=patient)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    [only_round] = result["rounds"]
    phases = only_round["1p1d"]
    assert list(phases) == ["quiet", "paced", "saturated", "floor"]
    for figures in phases.values():
        assert figures["tbt"]["max"] >= figures["tbt"]["p99"] >= figures["tbt"]["p50"] > 0
        assert figures["step"]["p50"] > 0
        assert figures["answer_tokens_per_s"] > 0
    assert phases["saturated"]["prompts_per_s"] >= 0  # 0 where no prompt ends within the few seconds
    assert phases["quiet"]["prompt_ttft"] is None
    assert result["verdicts"]["1p1d"]["client"]["floor_ratio"] > 0
    assert picture.read_text().startswith("<svg")
