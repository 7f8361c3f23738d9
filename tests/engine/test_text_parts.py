"""Text parts of models that also take images: what transformers' complete model computes for text."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelError
from baton.engine.load import load_model
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import LoraWeights, LowRank
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import Chunk
from baton.engine.weights.model_shape import read_model_shape
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.multimodal import MODELS, make_multimodal
from tests.fixtures.paged import CPU, PagedModel, random_prompt, unlikely

PROMPT = random_prompt(100)
LAYOUTS = {
    "llava": ("language_model.model.", "language_model.", ""),
    "transformers": ("model.language_model.", "", "model."),
    "qwen2_vl": ("model.", "", ""),
    "idefics": ("model.text_model.", "", "model."),
    "nemotron_h": ("language_model.backbone.", "language_model.", ""),
}
"""Prefixes of the body, of the head, and of other parts."""


class Made(NamedTuple):
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    return Made(folder, make_multimodal(folder, request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("llava")
    return Made(folder, make_multimodal(folder, "llava"))


def logits(folder: Path, packed: bool = False) -> torch.Tensor:
    paged = PagedModel(folder, packed=packed)
    table = paged.blocks(len(PROMPT))
    chunks = [Chunk(0, PROMPT[start : start + 37], start, table) for start in range(0, len(PROMPT), 37)]
    return torch.cat([part for chunk in chunks for part in paged.logits([chunk])])


def expected(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0]
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewritten(source: Path, folder: Path, stored: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_text_part_logits_equal_transformers(made: Made, packed: bool) -> None:
    assert isinstance(read_model_config(made.folder), DecoderConfig)
    torch.testing.assert_close(logits(made.folder, packed), expected(made.model), atol=3e-4, rtol=0)


def test_gemma3n_text_part_logits_equal_the_text_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers builds the complete model only with timm, so its text model is the reference."""
    alone, complete = make_checkpoint(tmp_path / "alone", "gemma3n_text"), tmp_path / "complete"
    complete.mkdir()
    stated = json.loads((alone / "config.json").read_text())
    (complete / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": stated}))
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors(alone).items()}
    save_file(stored | {"model.embed_vision.embedding.weight": torch.zeros(4, 4)}, complete / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32).eval()
    with caplog.at_level(logging.INFO):
        torch.testing.assert_close(logits(complete), expected(model), atol=3e-4, rtol=0)
    assert "reading the text part only: 1 tensors of embed_vision are left out" in caplog.messages


def test_text_part_with_its_config_is_read_under_the_complete_models_names(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_text")
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors(folder).items()}
    save_file(stored | {"model.visual.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits(folder), expected(model.eval()), atol=3e-4, rtol=0)


def test_text_part_greedy_answers_equal_transformers(made: Made) -> None:
    prompts = [random_prompt(length, seed=1) for length in (1, 33, 70)]
    answers = PagedModel(made.folder, 8, packed=True).greedy(prompts, 16, chunk_tokens=30)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert unlikely(made.model, prompt, answer) == []


def test_plan_and_worker_count_the_same_weights_of_a_text_part(made: Made) -> None:
    prepared = prepare_model(ModelOptions(made.folder, CPU, "float32", 8, 8 << 20, None))
    shape = read_model_shape(made.folder)
    assert prepared.config == shape.config
    assert prepared.weight_bytes == pytest.approx(4 * shape.parameters, rel=1e-3)  # without buffers of routers
    assert shape.parameters < sum(tensor.numel() for tensor in made.model.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_part_is_found_in_every_layout_of_names(layout: str, llava: Made, tmp_path: Path) -> None:
    body, head, other = LAYOUTS[layout]
    stored = {}
    for name, tensor in tensors(llava.folder).items():
        text = name.removeprefix("language_model.model.").removeprefix("language_model.")
        stored[(other if text == name else head if text.startswith("lm_head") else body) + text] = tensor
    folder = rewritten(llava.folder, tmp_path, stored)
    torch.testing.assert_close(logits(folder), expected(llava.model), atol=1e-4, rtol=0)


def test_other_parts_are_left_out_with_a_line_in_the_log(llava: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_model(llava.folder, torch.float32, CPU, progress=False)
    [line] = [message for message in caplog.messages if "text part" in message]
    assert line == "reading the text part only: 27 tensors of multi_modal_projector, vision_tower are left out"


def test_surplus_tensor_of_a_text_part_is_refused(llava: Made, tmp_path: Path) -> None:
    surplus = {"language_model.model.layers.0.self_attn.gate.weight": torch.zeros(4)}
    folder = rewritten(llava.folder, tmp_path, tensors(llava.folder) | surplus)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.gate\.weight"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_head_in_the_checkpoint_outweighs_tied_fields_that_disagree(tmp_path: Path) -> None:
    apart = make_multimodal(tmp_path / "saved", "mistral3", tie_word_embeddings=False)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    del config["tie_word_embeddings"]  # transformers' default is true, and false for its text part
    (tmp_path / "saved/config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(tmp_path / "saved"), expected(apart), atol=1e-4, rtol=0)


def test_adapter_of_a_complete_model_changes_its_text_part(llava: Made, tmp_path: Path) -> None:
    adapters = AdapterSet()
    paged = PagedModel(llava.folder, adapters=adapters)
    names = [f"{prefix}layers.0.self_attn.q_proj" for prefix in ("model.language_model.", "language_model.model.")]
    for name in names:
        adapters.add(name, LoraWeights({name: LowRank(torch.ones(2, 64), torch.ones(64, 2), 1.0)}))
    table = paged.blocks(3)
    plain, *adapted = (paged.logits([Chunk(0, PROMPT[:3], 0, table, adapter=number)])[0] for number in range(3))
    assert torch.equal(*adapted)
    assert not torch.equal(plain, adapted[0])


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts_are_read_in_both_layouts(turned: bool, tmp_path: Path) -> None:
    """Published Qwen3.5 checkpoints stack experts; transformers saves them one by one."""
    model = make_multimodal(tmp_path, "qwen3_5_moe")
    stored = {name: tensor for name, tensor in tensors(tmp_path).items() if ".experts." not in name}
    for name, tensor in model.named_parameters():
        if ".experts." in name:
            stored[name] = tensor.detach().transpose(1, 2) if turned else tensor.detach()
    folder = tmp_path / "stacked"
    folder.mkdir()
    torch.testing.assert_close(logits(rewritten(tmp_path, folder, stored)), expected(model), atol=3e-4, rtol=0)


def test_known_text_config_of_an_unknown_model_type_is_read(llava: Made, tmp_path: Path) -> None:
    stated = json.loads((llava.folder / "config.json").read_text())
    own = {"model_type": "new_vl", "auto_map": {"AutoConfig": "new.Config"}, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps({**own, "text_config": stated["text_config"]}))
    config = read_model_config(tmp_path)
    assert isinstance(config, DecoderConfig)
    assert (config.family, config.is_text_part, config.eos_token_ids) == ("llama", True, frozenset({7}))


def test_model_with_bidirectional_prompts_is_no_text_part(tmp_path: Path) -> None:
    text = {"model_type": "gemma2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma", "text_config": text}))
    with pytest.raises(ModelError, match="model_type 'paligemma' cannot be served"):
        read_model_config(tmp_path)
