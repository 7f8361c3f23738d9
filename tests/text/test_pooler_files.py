"""What a checkpoint's sentence-transformers files say, as that library writes them, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.text.pooler_files import LogitScore, Pooler, PoolingRefused, read_pooler
from baton.text.pooling import Pooling, PoolingKind
from tests.fixtures.poolers import pooling_config, write_dense, write_logit_score, write_modules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_checkpoint_without_pooler_files_uses_the_normalised_last_token(folder: Path) -> None:
    assert read_pooler(folder) == Pooler(Pooling(PoolingKind.LAST), normalises=True)


@pytest.mark.parametrize(("mode", "kind"), [("cls", PoolingKind.FIRST), ("mean", PoolingKind.MEAN)])
@pytest.mark.parametrize("normalises", [True, False])
def test_both_spellings_of_a_mode_are_read(mode: str, kind: PoolingKind, normalises: bool, folder: Path) -> None:
    for config in (pooling_config(mode), {"pooling_mode": mode}):
        assert read_pooler(write_modules(folder, config, normalises)) == Pooler(Pooling(kind), normalises)


def test_rerankers_tokens_are_read(folder: Path) -> None:
    assert read_pooler(write_logit_score(folder, 7, 9)).score == LogitScore((7, 9))
    assert read_pooler(write_logit_score(folder, 7, None)).score == LogitScore((7,))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "1_Pooling/config.json: pooling pooling_mode_max_tokens is not served"),
        ({"pooling_mode": "weightedmean"}, "1_Pooling/config.json: pooling weightedmean is not served"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "1_Pooling/config.json: pooling mean and cls is not served",
        ),
        ({}, "1_Pooling/config.json: pooling none is not served"),
    ],
)
def test_other_ways_to_pool_are_refused_by_name(config: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(PoolingRefused, match=message):
        read_pooler(write_modules(folder, config, normalises=True))


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"])
@pytest.mark.parametrize("content", ["", '[{"type": ', "[1]", '"x"'])
def test_damaged_file_is_named(name: str, content: str, folder: Path) -> None:
    write_modules(folder, pooling_config("cls"), normalises=True)
    (folder / name).write_text(content)
    with pytest.raises(PoolingRefused, match=f"^{folder / name}: "):
        read_pooler(folder)


def test_missing_file_of_a_module_is_named(folder: Path) -> None:
    write_modules(folder, pooling_config("cls"), normalises=True)
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(PoolingRefused, match=f"^{folder / '1_Pooling' / 'config.json'}: No such file"):
        read_pooler(folder)


def test_unsupported_module_is_rejected_by_name(folder: Path) -> None:
    (folder / "modules.json").write_text(
        json.dumps([{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}])
    )
    with pytest.raises(PoolingRefused, match=r"modules.json: the module Dense of the checkpoint is not served"):
        read_pooler(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"activation_function": "torch.nn.modules.activation.Tanh"},
            "2_Dense/config.json: activation_function 'torch",
        ),
        ({"activation_function": None}, "2_Dense/config.json: activation_function None is not served, only"),
        ({"in_features": 32}, "2_Dense/config.json: in_features 32 and out_features 8 do not fit"),
        ({"out_features": 0}, "2_Dense/config.json: in_features 64 and out_features 0 do not fit"),
    ],
)
def test_unsupported_linear_layer_is_rejected_by_name(changes: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 64}))
    write_dense(folder, [torch.zeros(8, 64)])
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(PoolingRefused, match=message):
        read_pooler(folder)


def test_dimensions_that_the_checkpoint_lists_are_the_only_ones(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"matryoshka_dimensions": [16, 32]}))
    pooler = read_pooler(folder)
    pooler.check_dimensions(16, size=64)
    pooler.check_dimensions(64, size=64)
    with pytest.raises(ValueError, match="dimensions: this model's vectors can be cut to 16, 32, not to 20"):
        pooler.check_dimensions(20, size=64)


def test_default_prompt_precedes_a_text_and_unknown_names_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    stated = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(stated))
    prompts = read_pooler(tmp_path).prompts
    assert [prompts.text(name) for name in (None, "query", "document")] == ["query: ", "query: ", ""]
    with pytest.raises(ValueError, match="prompt_name: the model has no prompt of that name; it has document, query"):
        prompts.text("passage")


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({}, "config.json: a classification head of 2 labels is not served; it must have 1"),
        ({"num_labels": 1, "model_type": "modernbert"}, "a classification head of model_type 'modernbert'"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Tanh"}, "the activation torch.nn.Tanh"),
    ],
)
def test_unsupported_head_is_rejected_by_name(fields: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    config = {"architectures": ["XForSequenceClassification"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PoolingRefused, match=refusal):
        read_pooler(tmp_path)


def test_head_that_states_identity_gives_its_logit(tmp_path: Path) -> None:
    stated = {"activation_fn": "torch.nn.modules.linear.Identity"}
    config = {"architectures": ["BertForSequenceClassification"], "num_labels": 1, "sentence_transformers": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    score = read_pooler(tmp_path).score
    assert score is not None and score.pair and score.value((-3.0,)) == -3.0
