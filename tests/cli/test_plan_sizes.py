"""`baton plan`: sizes from config.json alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.cli.__main__ import app
from baton.engine import LLM
from baton.engine.weights.files import read_safetensors_header
from baton.launch import CommandFailed
from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder

GGUF_FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
OPT_30B: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 7168,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "ffn_dim": 28672,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 7168,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def plan(folder: Path, config: dict[str, Any], *flags: str) -> Result:
    """For a GPU, so that the checkpoint's own dtype counts, whatever this machine's CPU computes in."""
    (folder / "config.json").write_text(json.dumps(config))
    asked = ["plan", "--model", str(folder), "--device", "cuda", *flags]
    return CliRunner().invoke(app, asked, catch_exceptions=False)


def planned(folder: Path, *flags: str) -> str:
    return CliRunner().invoke(app, ["plan", "--model", str(folder), *flags], catch_exceptions=False).stdout


def sizes(folder: Path, config: dict[str, Any], *flags: str) -> Any:
    return json.loads(plan(folder, config, "--json", *flags).output)


def test_plan_opt_30b_needs_168_gib(tmp_path: Path) -> None:
    """4 x batch x layers x hidden x tokens: keys and values, two bytes each. 168 GiB, which papers write as 180 GB."""
    found = sizes(tmp_path, OPT_30B, "--dtype", "bfloat16", "--max-model-len", "1024", "--batch", "128")
    assert found["batch_kv_bytes"] == 4 * 128 * 48 * 7168 * 1024 == 168 * 2**30
    assert found["kv_token_bytes"] == 4 * 48 * 7168
    assert found["blocks"] == 128 * 1024 // 32
    assert found["max_concurrency"] == 128.0
    assert found["parameters"] == pytest.approx(30e9, rel=0.01)
    text = plan(tmp_path, OPT_30B, "--dtype", "bfloat16", "--max-model-len", "1024", "--batch", "128").output
    assert "128 x 1,024 tokens need 168 GiB of KV" in text


def test_plan_grouped_query_attention_needs_less(tmp_path: Path) -> None:
    found = sizes(tmp_path, TINY, "--kv-memory", "1MiB")
    assert found["kv_token_bytes"] == 2 * 4 * 2 * 16 * 2
    assert found["blocks"] == 2**20 // (32 * 512)
    assert found["max_concurrency"] == 1.0
    assert found["dtype"] == "bfloat16"


def test_plan_that_does_not_fit_names_enough_memory(tmp_path: Path) -> None:
    output = plan(tmp_path, TINY, "--kv-memory", "1MiB", "--batch", "4").output
    assert "Maximum concurrency for 2,048 tokens per request: 1.00x" in output
    assert f"does not fit: --kv-memory {4 * 2**20} would do" in output
    again = plan(tmp_path, TINY, "--kv-memory", str(4 * 2**20), "--batch", "4").output
    assert "does not fit" not in again


def test_plan_beyond_context_is_refused(tmp_path: Path) -> None:
    from baton.launch import CommandFailed

    with pytest.raises(CommandFailed, match="context of 2048 tokens"):
        plan(tmp_path, TINY, "--max-model-len", "4096")


def test_plan_without_config_is_refused(tmp_path: Path) -> None:
    from baton.launch import CommandFailed

    with pytest.raises(CommandFailed, match=r"no config\.json"):
        CliRunner().invoke(app, ["plan", "--model", str(tmp_path)], catch_exceptions=False)


def test_plan_of_quantised_checkpoint_follows_its_config(tmp_path: Path) -> None:
    quantised = {**TINY, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
    found = sizes(tmp_path, quantised)
    assert found["weights"] == "gptq"
    assert found["weight_bytes"] < sizes(tmp_path, TINY)["weight_bytes"]
    with pytest.raises(CommandFailed, match="already quantised as gptq"):
        plan(tmp_path, quantised, "--quantize", "int8")


@pytest.mark.parametrize(
    ("family", "labels"),
    [("bert", None), ("modernbert", None), ("nomic_bert", None), ("xlm-roberta", 1), ("qwen3", 1)],
)
def test_plan_of_encoder_counts_its_weights(family: str, labels: int | None, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, family, labels=labels)
    header = read_safetensors_header(folder / "model.safetensors")
    stored = sum(math.prod(tensor.shape) for tensor in header.values())
    found = json.loads(planned(folder, "--json"))
    assert (found["parameters"], found["keeps_kv"]) == (stored, family == "qwen3")
    assert ("KV                 none: each prompt is computed in one step" in planned(folder)) is (family != "qwen3")


@pytest.mark.parametrize("file", sorted(GGUF_FILES.glob("*.gguf")), ids=lambda file: file.stem)
def test_plan_of_gguf_file_counts_its_weights(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    found = json.loads(planned(file, "--json", "--dtype", "float32", "--device", "cpu"))
    assert found["weights"] == "gguf"
    assert found["weight_bytes"] == pytest.approx(4 * found["parameters"], rel=0.1)  # files leave out poolers


def test_plan_of_quantised_encoder_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    with pytest.raises(CommandFailed, match="bert runs through transformers' code, which needs plain weights"):
        planned(folder, "--quantize", "int8")


@pytest.mark.parametrize("native_bf16", [True, False])
@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("bfloat16", {}),
        ("float16", {}),
        ("float32", {}),
        ("float32", {"dtype": "bfloat16", "block_size": 16}),
        ("bfloat16", {"kv_cache_dtype": "fp8"}),
        ("bfloat16", {"quantization": "int8"}),
        ("float16", {"quantization": "int4", "kv_cache_dtype": "int8", "max_model_len": 100}),
    ],
)
def test_plan_states_the_sizes_of_a_started_engine(
    tmp_path: Path, stored: str, options: dict[str, Any], native_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.prepare.has_bf16_arithmetic", lambda: native_bf16)
    folder = make_checkpoint(tmp_path / "model", "qwen3", dtype=stored, num_hidden_layers=1)
    started = LLM(str(folder), device="cpu", kv_memory=1 << 20, quiet=True, **options)._engine
    named = {"quantization": "quantize", **{name: name.replace("_", "-") for name in options if name != "quantization"}}
    flags = [part for name, value in options.items() for part in (f"--{named[name]}", str(value))]
    found = json.loads(planned(folder, "--json", "--device", "cpu", "--kv-memory", "1MiB", *flags))
    prepared, sizing = started._prepared, started.sizing
    assert (found["dtype"], found["kv_dtype"]) == (prepared.dtype_name, prepared.kv_dtype_name)
    assert (found["kv_token_bytes"], found["kv_block_bytes"]) == (sizing.token_bytes, sizing.block_bytes)
    assert (found["block_tokens"], found["blocks"]) == (sizing.block_tokens, prepared.total_blocks)
    assert (found["weights"], found["weight_bytes"]) == (prepared.weight_format, prepared.weight_bytes)


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta"])
def test_plan_of_an_encoder_states_the_sizes_of_a_started_engine(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", family)
    started = LLM(str(folder), device="cpu", kv_memory=1 << 20, quiet=True)._engine._prepared
    found = json.loads(planned(folder, "--json", "--device", "cpu", "--kv-memory", "1MiB"))
    assert (found["dtype"], found["weights"], found["weight_bytes"]) == (
        started.dtype_name,
        started.weight_format,
        started.weight_bytes,
    )
    assert (found["keeps_kv"], found["max_model_len"]) == (False, started.max_model_len)


def test_plan_without_weights_refuses_a_damaged_tokenizer_as_the_server_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    (folder / "model.safetensors").unlink()
    planned(folder)
    (folder / "tokenizer.json").write_text("{")
    refused = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    with pytest.raises(TokenizerRefused) as by_server:
        read_tokenizer(folder)
    assert isinstance(refused.exception, CommandFailed) and str(refused.exception) == str(by_server.value)


def test_plan_refuses_a_checkpoint_without_a_tokenizer_as_the_server_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    (folder / "tokenizer.json").unlink()
    refused = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    assert isinstance(refused.exception, CommandFailed) and "there is no tokenizer" in str(refused.exception)
