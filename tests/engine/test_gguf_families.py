"""GGUF files alone, as llama.cpp's converter writes them, answer like the checkpoints they were made from."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.engine import LLM, SamplingParams
from baton.engine.offline.prompts import TokensPrompt
from baton.text.gguf.config import DECODERS, config_of
from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import GgufRefused, read_model_header

FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
EXPECTED = json.loads((FILES / "expected.json").read_text())
SAME = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
"""Architectures of text parts, and the architecture whose files differ from theirs in names only."""
LOGPROB_ERROR = 2e-4  # sums in another order, and norms stored as weight + 1


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", EXPECTED)
def test_file_answers_like_the_checkpoint_it_was_made_from(name: str) -> None:
    llm = LLM(model=str(FILES / f"{name}.gguf"), dtype="float32", max_model_len=64)
    prompts = [TokensPrompt(prompt_token_ids=each["prompt"]) for each in EXPECTED[name]]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    for output, expected in zip(llm.generate(prompts, params), EXPECTED[name], strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        assert list(answer.token_ids) == expected["answer"]
        for token_id, step, wanted in zip(answer.token_ids, answer.logprobs, expected["logprobs"], strict=True):
            assert math.isclose(step[token_id].logprob, wanted, abs_tol=LOGPROB_ERROR)


def test_every_supported_architecture_has_a_file() -> None:
    architectures = {read_model_header(FILES / f"{name}.gguf").architecture for name in EXPECTED}
    assert architectures | SAME.keys() == DECODERS.keys()


@pytest.mark.parametrize(("vision", "text"), SAME.items())
def test_text_part_of_a_vision_model_has_the_configuration_of_the_text_model(vision: str, text: str) -> None:
    header = read_model_header(FILES / f"{text}.gguf")
    metadata = {re.sub(rf"^{text}\.", f"{vision}.", key): value for key, value in header.metadata.items()}
    renamed = replace(header, metadata={**metadata, "general.architecture": vision})
    assert config_of(renamed) == config_of(header)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("llama", "block_count", 2**32 - 1, "block_count 4294967295 with nextn_predict_layers 0 is not possible in a"),
        ("llama", "block_count", 0, "block_count 0 with nextn_predict_layers 0 is not possible in a file of"),
        ("llama", "nextn_predict_layers", 2**32 - 1, "with nextn_predict_layers 4294967295 is not possible in a file"),
        ("llama", "attention.head_count", 0, "attention.head_count is 0; it must be at least 1"),
        ("llama", "embedding_length", 0, "embedding_length is 0; it must be at least 1"),
        ("qwen35", "ssm.time_step_rank", 0, "ssm.time_step_rank is 0; it must be at least 1"),
        ("granitehybrid", "ssm.time_step_rank", 0, "ssm.time_step_rank is 0; it must be at least 1"),
        ("nemotron_h", "ssm.time_step_rank", 0, "ssm.time_step_rank is 0; it must be at least 1"),
        ("nemotron_h", "moe_latent_size", 8, "moe_latent_size is not supported"),
    ],
)
def test_impossible_number_is_refused_by_its_key(name: str, key: str, value: int, message: str) -> None:
    header = read_model_header(FILES / f"{name}.gguf")
    changed = replace(header, metadata={**header.metadata, f"{header.architecture}.{key}": value})
    with pytest.raises(GgufRefused, match=re.escape(message)) as refusal:
        config_of(changed)
    assert str(refusal.value).startswith(f"{header.architecture}.")


def test_bases_of_rotations_have_other_keys_in_the_first_files_of_ollama() -> None:
    header = read_model_header(FILES / "gemma3.gguf")
    usual = {"gemma3.rope.freq_base": 5e5, "gemma3.rope.freq_base_swa": 2e4}
    own = {"gemma3.rope.global.freq_base": 5e5, "gemma3.rope.local.freq_base": 2e4}
    others = {key: value for key, value in header.metadata.items() if key not in usual}
    config = config_of(replace(header, metadata=others | usual))
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 5e5
    assert config == config_of(replace(header, metadata=others | own))


def test_layer_of_no_kind_is_named() -> None:
    header = read_model_header(FILES / "nemotron_h.gguf")
    tensors = {name: tensor for name, tensor in header.tensors.items() if not name.startswith("blk.1.")}
    with pytest.raises(GgufRefused, match=r"^layer 1 has none of ssm_in\.weight, "):
        config_of(replace(header, tensors=tensors))


def test_layers_for_multi_token_prediction_are_not_used() -> None:
    header = read_model_header(FILES / "llama.gguf")
    count = header.metadata["llama.block_count"]
    predicting = replace(header, metadata={**header.metadata, "llama.nextn_predict_layers": 1})
    left_out = header.tensors.keys() - predicting.used_tensors.keys()
    assert isinstance(count, int) and left_out
    assert left_out == {name for name in header.tensors if name.startswith(f"blk.{count - 1}.")}


def test_folders_of_a_changed_and_of_a_removed_file_are_removed(tmp_path: Path) -> None:
    changed_file, removed = (Path(shutil.copy(FILES / "llama.gguf", tmp_path / f"{name}.gguf")) for name in "ab")
    kept = folder_of(FILES / "llama.gguf", tmp_path / "cache")
    folder_of(changed_file, tmp_path / "cache")
    folder_of(removed, tmp_path / "cache")
    removed.unlink()
    os.utime(changed_file, (1.0, 1.0))
    again = folder_of(changed_file, tmp_path / "cache")
    assert {path for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {kept, again}


def test_folder_of_a_file_has_its_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    folder = folder_of(FILES / "llama.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Name the capital of 3 countries!\n"
    encoded = tokenizer.encode(f"<|im_start|>{text}<|im_end|>")
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == text
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert set(map(tokenizer.id_to_token, ends)) == {"<|im_end|>", "<|endoftext|>"}


def test_folder_is_made_once_per_file(tmp_path: Path) -> None:
    folder = folder_of(FILES / "llama.gguf", tmp_path)
    written = (folder / "config.json").stat().st_mtime_ns
    assert folder_of(FILES / "llama.gguf", tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("name", "pieces"),
    [("llama", ["a", "=-", "b", "Ġ", "123", "4"]), ("qwen2", ["a", "=-", "b", "Ġ", "1", "2", "3", "4"])],
)
def test_file_without_a_named_split_gets_that_of_its_model_or_llama_cpps_default(
    tmp_path: Path, name: str, pieces: list[str]
) -> None:
    folder = folder_of(changed(tmp_path, b"tokenizer.ggml.pre", b"tokenizer.ggml.prf", name), tmp_path)
    splits = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in splits.pre_tokenize_str("a=-b 1234")] == pieces


def changed(tmp_path: Path, before: bytes, after: bytes, name: str = "llama") -> Path:
    content = (FILES / f"{name}.gguf").read_bytes()
    assert before in content
    path = tmp_path / "changed.gguf"
    path.write_bytes(content.replace(before, after))
    return path


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0llamb",
            r"architecture 'llamb' is not supported; supported are ",
        ),
        (
            b"general.type\x08\0\0\0\5\0\0\0\0\0\0\0model",
            b"general.type\x08\0\0\0\5\0\0\0\0\0\0\0mmpro",
            r"general\.type 'mmpro' is not supported; supported is 'model': give the file of the model itself",
        ),
        (b"llama.block_count", b"llama.block_cound", r"has no llama\.block_count"),
        (b"gpt-2", b"gpt-9", r"tokenizer\.ggml\.pre 'gpt-9' is not supported"),
        (b"GGUF", b"GGML", "not a GGUF file"),
    ],
)
def test_unusable_file_is_refused_by_name(tmp_path: Path, before: bytes, after: bytes, message: str) -> None:
    with pytest.raises(GgufRefused, match=rf"changed\.gguf: {message}"):
        folder_of(changed(tmp_path, before, after), tmp_path)


def test_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00002.gguf"
    part.write_bytes((FILES / "llama.gguf").read_bytes())
    with pytest.raises(GgufRefused, match=r"a part of a split model, of which model-00002-of-00002\.gguf is missing"):
        folder_of(part, tmp_path)
