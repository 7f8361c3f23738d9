"""Published config.json files: what the engine reads from each is its row in tests/fixtures/configs/README.md.

A failure shows the new row.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelConfig, ModelError
from baton.engine.config.resolved_config import read_transformers_config
from baton.engine.kv_cache.layout import kv_layout

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "tests/fixtures/configs").glob("*.json"))
PAGE = (ROOT / "tests/fixtures/configs/README.md").read_text()
TABLES = PAGE.partition("## Configurations that are tested")[2].splitlines()


def row(path: Path, folder: Path) -> str:
    (folder / "config.json").write_bytes(path.read_bytes())
    try:
        cells = facts(read_model_config(folder), read_transformers_config(folder))
    except ModelError as error:
        cells = [str(error).removeprefix("config.json: ")]
    return f"| {' | '.join([f'`{path.stem}`', *cells])} |"


def facts(config: ModelConfig, stated: Any) -> list[str]:
    dtype = stated.get_text_config(decoder=True).dtype or torch.bfloat16
    own = [ropes(config), windows(config)] if isinstance(config, DecoderConfig) else ["transformers' code", "its own"]
    return [
        str(config.num_layers),
        f"{config.num_heads} / {config.num_kv_heads} x {config.head_dim}",
        *own,
        str(config.max_positions),
        str(dtype).removeprefix("torch."),
        str(kv_layout(config, dtype, 1).token_bytes),
        ", ".join(map(str, sorted(config.eos_token_ids))),
    ]


def ropes(config: DecoderConfig) -> str:
    ways = [f"{rope.kind.value} {rope.theta:.0f}" if rope.theta > 1 else rope.kind.value for rope in config.ropes]
    part = "" if config.rotary_dim == config.head_dim else f" of {config.rotary_dim}"
    return ", ".join(_counted(ways)) + part


def windows(config: DecoderConfig) -> str:
    return ", ".join(_counted(["none" if each is None else str(each) for each in config.sliding_window]))


def _counted(ways: list[str]) -> list[str]:
    """Each way once, in the order of the layers, with the number of its layers where there are several ways."""
    each = list(dict.fromkeys(ways))
    return each if len(each) == 1 else [f"{ways.count(way)} x {way}" for way in each]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_published_configuration_is_read_as_documented(path: Path, tmp_path: Path) -> None:
    documented = [line for line in TABLES if line.startswith(f"| `{path.stem}` ")]
    assert documented == [row(path, tmp_path)]


def test_each_documented_configuration_has_its_file() -> None:
    named = {line.split("`")[1] for line in TABLES if line.startswith("| `")}
    assert named == {path.stem for path in PUBLISHED}


@pytest.mark.filterwarnings("ignore")
def test_refusal_has_the_first_line_of_an_error_of_transformers_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **others: object) -> None:
        raise TypeError("wrong arguments\nand every signature that there is")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", fails)
    other = tmp_path / "other.json"
    other.write_text('{"model_type": "gpt2"}')
    assert row(other, tmp_path).endswith("fails without a cache: TypeError: wrong arguments |")
