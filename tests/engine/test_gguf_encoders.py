"""GGUF files of encoders, as llama.cpp's converter writes them, give the vectors and scores of their checkpoints."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine import LLM
from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.load import check_tensors
from baton.text.gguf.config import DECODERS, ENCODERS, config_of
from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import GgufRefused, read_model_header
from baton.text.model_folder import check_complete
from baton.text.tokenizer.checkpoint_tokenizer import read_tokenizer
from tests.fixtures.poolers import furthest

FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
EXPECTED = json.loads((FILES / "vectors.json").read_text())
VECTORS = [name for name, each in EXPECTED.items() if "vectors" in each]
CLOSE = 1e-5
LARGE = struct.pack("<I", 1 << 24)  # the largest size in config.json: a matrix of such sides has 1 PiB


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


def loaded(file: Path) -> LLM:
    return LLM(model=str(file), dtype="float32", quiet=True, kv_cache_memory_bytes=1 << 20)


def changed(tmp_path: Path, name: str, before: bytes, after: bytes) -> Path:
    content = (FILES / f"{name}.gguf").read_bytes()
    assert content.count(before) == 1
    path = tmp_path / "changed.gguf"
    path.write_bytes(content.replace(before, after))
    return path


def squeezed(tmp_path: Path, name: str, tensor: str) -> Path:
    """Write a file of which a matrix of one row is a vector, as older converters write it."""
    content, path = (FILES / f"{name}.gguf").read_bytes(), tmp_path / "squeezed.gguf"
    start, hidden = read_model_header(FILES / f"{name}.gguf").size_bytes, 32
    before, after = struct.pack("<IQQ", 2, hidden, 1), struct.pack("<IQ", 1, hidden)
    assert content[:start].count(tensor.encode() + before) == 1
    head = content[:start].replace(tensor.encode() + before, tensor.encode() + after)
    path.write_bytes(head + bytes(64) + content[start:])
    own_start = read_model_header(path).size_bytes
    path.write_bytes(head[:own_start].ljust(own_start, b"\0") + content[start:])
    return path


def test_every_supported_architecture_has_a_file() -> None:
    architectures = {read_model_header(FILES / f"{name}.gguf").architecture for name in EXPECTED}
    assert architectures - DECODERS.keys() == ENCODERS.keys()


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_file_equal_those_of_its_checkpoint(name: str) -> None:
    outputs = loaded(FILES / f"{name}.gguf").embed(EXPECTED[name]["texts"], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == EXPECTED[name]["ids"]
    assert furthest([output.outputs.embedding for output in outputs], EXPECTED[name]["vectors"]) < CLOSE


@pytest.mark.parametrize(("name", "given"), [("xlm-roberta-head", "pairs"), ("qwen3-reranker", "documents")])
def test_scores_of_file_with_head_equal_those_of_its_checkpoint(name: str, given: str) -> None:
    expected = EXPECTED[name]
    outputs = loaded(FILES / f"{name}.gguf").score(*map(list, zip(*expected[given], strict=True)))
    assert [output.prompt_token_ids for output in outputs] == expected["ids"]
    scores = [1 / (1 + math.exp(-logit)) for logit in expected["logits"]]
    assert furthest([[output.outputs.score for output in outputs]], [scores]) < CLOSE


def test_types_stored_as_a_vector_give_the_same_vectors(tmp_path: Path) -> None:
    path = squeezed(tmp_path, "roberta", "token_types.weight")
    outputs = loaded(path).embed(EXPECTED["roberta"]["texts"], use_tqdm=False)
    assert furthest([output.outputs.embedding for output in outputs], EXPECTED["roberta"]["vectors"]) < CLOSE


def test_head_stored_as_a_vector_gives_the_same_scores(tmp_path: Path) -> None:
    pairs, scores = EXPECTED["xlm-roberta-head"]["pairs"], []
    for path in (FILES / "xlm-roberta-head.gguf", squeezed(tmp_path, "xlm-roberta-head", "cls.output.weight")):
        outputs = loaded(path).score(*map(list, zip(*pairs, strict=True)))
        scores.append([output.outputs.score for output in outputs])
    assert scores[0] == scores[1]


@pytest.mark.parametrize("name", EXPECTED)
def test_folder_of_file_is_complete(name: str, tmp_path: Path) -> None:
    folder = folder_of(FILES / f"{name}.gguf", tmp_path)
    check_complete(folder)
    tokenizer = read_tokenizer(folder).tokenizer()
    for key in ("texts", "pairs"):
        for given, ids in zip(EXPECTED[name].get(key, ()), EXPECTED[name]["ids"], strict=False):
            encoded = tokenizer.encode(given) if key == "texts" else tokenizer.encode(*given)
            assert encoded.ids == ids


def test_pooling_that_is_not_served_is_refused_by_its_key(tmp_path: Path) -> None:
    key = b"bert.pooling_type" + struct.pack("<I", 4)
    path = changed(tmp_path, "bert", key + struct.pack("<I", 2), key + struct.pack("<I", 4))
    with pytest.raises(GgufRefused, match=r"changed\.gguf: bert\.pooling_type 4 is not supported; supported are 1 "):
        folder_of(path, tmp_path)


def test_classifier_of_a_decoder_without_template_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3-reranker", b".chat_template.rerank", b".chat_template.rerun_")
    with pytest.raises(GgufRefused, match=r"cls\.output\.weight of a qwen3 is supported only with"):
        folder_of(path, tmp_path)


def test_classifier_whose_rows_are_not_in_the_embedding_gives_the_scores(tmp_path: Path) -> None:
    """The rows of "yes" and "no" are exchanged in the classifier, so that they differ from those of the embedding."""
    original, path, expected = FILES / "qwen3-reranker.gguf", tmp_path / "own.gguf", EXPECTED["qwen3-reranker"]
    head, content = read_model_header(original).tensors["cls.output.weight"], bytearray(original.read_bytes())
    rows = content[head.start : head.start + head.stored_bytes]
    content[head.start : head.start + head.stored_bytes] = rows[head.row_bytes :] + rows[: head.row_bytes]
    path.write_bytes(content)
    folder = folder_of(path, tmp_path / "cache")
    check_tensors(folder, read_model_config(folder))
    outputs = loaded(path).score(*map(list, zip(*expected["documents"], strict=True)))
    assert [output.prompt_token_ids for output in outputs] == expected["ids"]
    scores = [1 / (1 + math.exp(logit)) for logit in expected["logits"]]
    assert furthest([[output.outputs.score for output in outputs]], [scores]) < CLOSE


def test_missing_tensor_of_an_encoder_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path, "bert", b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight")
    with pytest.raises(ModelError, match=r"the GGUF file has no tensor blk\.1\.ffn_up\.weight"):
        loaded(path)


def test_surplus_tensors_of_an_encoder_are_named(tmp_path: Path) -> None:
    key = b"bert.block_count" + struct.pack("<I", 4)
    path = changed(tmp_path, "bert", key + struct.pack("<I", 3), key + struct.pack("<I", 2))
    with pytest.raises(ModelError, match=r"the GGUF file has \d+ tensors this model does not use, among them blk\.2\."):
        loaded(path)


def test_tensor_of_another_shape_is_named_before_memory_is_allocated(tmp_path: Path) -> None:
    path = FILES / "bert.gguf"
    for key, value in ((b"bert.feed_forward_length", 48), (b"bert.embedding_length", 32)):
        stated = key + struct.pack("<I", 4)
        path = changed(tmp_path, str(path.with_suffix("")), stated + struct.pack("<I", value), stated + LARGE)
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight is \[\d+, 32\], .* implies \[\d+, 16777216\]"):
        loaded(path)


def test_joined_projections_of_another_shape_are_named(tmp_path: Path) -> None:
    name = b"blk.0.attn_qkv.weight"
    before, after = struct.pack("<IQQ", 2, 32, 96), struct.pack("<IQQ", 2, 32, 95)
    path = changed(tmp_path, "nomic-bert", name + before, name + after)
    with pytest.raises(ModelError, match=r"attn_qkv\.weight is \[95, 32\], config\.json implies \[96, 32\]"):
        loaded(path)


@pytest.mark.parametrize(
    ("architecture", "part"), [("jina-bert-v2", r"\(ALiBi\)"), ("nomic-bert-moe", "experts in encoders")]
)
def test_encoder_of_which_the_engine_lacks_a_part_is_refused_by_it(architecture: str, part: str) -> None:
    header = read_model_header(FILES / "bert.gguf")
    named = replace(header, metadata={**header.metadata, "general.architecture": architecture})
    with pytest.raises(GgufRefused, match=rf"'{architecture}' is not .*, since the engine has no .*{part}; supp"):
        config_of(named)


@pytest.mark.parametrize(("file", "family"), [("nomic-bert", "nomic_bert"), ("modern-bert", "modernbert")])
def test_head_of_a_family_without_heads_is_refused(file: str, family: str) -> None:
    header = read_model_header(FILES / f"{file}.gguf")
    tensors = {**header.tensors, "cls.output.weight": header.tensors["token_embd.weight"]}
    reason = rf"cls\.output\.weight of a {family} is not supported; .*, or one of roberta, xlm-roberta$"
    with pytest.raises(GgufRefused, match=reason):
        config_of(replace(header, tensors=tensors))
