"""`baton up` refuses sizes that model or machine cannot have before it starts a process."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import up
from baton.cli.__main__ import app
from baton.launch import CommandFailed
from baton.launch.tiny_checkpoint import write_tiny_checkpoint


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-memory", "900GiB"], r"--kv-memory for 2 workers of 1800 GiB do not fit into .*; .* may be .* at most"),
        (["--swap-memory", "900GiB"], r"--swap-memory of 900 GiB and .* do not fit into"),
        (["--decode", "60", "--kv-memory", "20GiB"], r"--kv-memory for 61 workers of 1220 GiB do not fit into"),
        (["--max-model-len", "999999"], r"max-model-len: 999999 tokens exceed the model's 2048 positions; give 2048"),
        (["--kv-memory", "1KiB"], r"kv-memory: 1024 bytes are 0 blocks .* are needed: give \d+ bytes"),
        (
            ["--kv-memory", "64KiB", "--max-model-len", "2048"],
            r"max-model-len: 2048 tokens need \d+ bytes of kv-memory",
        ),
        (["--tensor-parallel", "64"], "tensor-parallel.* 64"),
    ],
)
def test_up_with_sizes_that_do_not_fit_ends_before_anything_starts(
    tmp_path: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(up, "_Up", None)  # whose run would start processes
    with pytest.raises(CommandFailed, match=message):
        CliRunner().invoke(
            app,
            ["up", "--port", "0", "--http-port", "0", "--model", str(tmp_path / "model"), *flags],
            catch_exceptions=False,
        )
