"""A tokenizer of which a file is empty or cut short is refused, and the error names the file."""

from pathlib import Path

import pytest

from baton.text.tokenizer import convert
from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer
from tests.fixtures.tokenizer_layouts import layouts, other_formats, write

FILES = (
    ("llama-2", "tokenizer.json"),
    ("llama-2", "tokenizer_config.json"),
    ("llama-2", "special_tokens_map.json"),
    ("llama-2", "config.json"),
    ("tinyllama-added_tokens.json", "added_tokens.json"),
    ("gemma-3-processor-template", "chat_template.json"),
    ("mistral-v3-tekken", "tekken.json"),
    ("qwen2-without-tokenizer.json", "vocab.json"),
    ("mistral-v3-tekken", "chat_template.jinja"),
    ("templates-in-files", "additional_chat_templates/tool_use.jinja"),
    ("minilm", "modules.json"),
    ("minilm", "sentence_bert_config.json"),
    ("llama-2-tokenizer.model", "tokenizer.model"),
    ("llama-3-tiktoken", "tokenizer.model"),
    ("tiktoken.model", "tiktoken.model"),
)
BROKEN = "{% for m in messages %}{{ m['content']"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "model", (layouts() | other_formats())[request.param])


@pytest.mark.parametrize(("folder", "name"), FILES, indirect=["folder"])
@pytest.mark.parametrize(("kept", "reason"), [(0.0, "is empty"), (0.6, "")])
def test_file_that_is_cut_short_is_named(folder: Path, name: str, kept: float, reason: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    if not reason and path.suffix == ".json":
        reason = "not valid JSON"
    with pytest.raises(TokenizerRefused, match=f"^{path}: {reason}"):
        read_tokenizer(folder)


def test_file_that_is_cut_short_is_named_by_a_process_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MODULE", "a module that is never imported")
    folder = write(tmp_path / "model", layouts()["llama-2"] | {"tokenizer.json": ""})
    with pytest.raises(TokenizerRefused, match=f"^{folder / 'tokenizer.json'}: is empty"):
        read_tokenizer(folder)


def test_empty_file_of_something_else_is_not_blamed(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", layouts()["llama-2"] | {"tokenizer.json": "", "requirements.txt": ""})
    with pytest.raises(TokenizerRefused, match=f"^{folder / 'tokenizer.json'}: is empty"):
        read_tokenizer(folder)


def test_code_of_the_checkpoint_is_refused_next_to_an_empty_file(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    folder = write(tmp_path / "model", {"tokenizer.model": "", "tokenizer_config.json": code, "requirements.txt": ""})
    with pytest.raises(TokenizerRefused, match="its class is code of the checkpoint"):
        read_tokenizer(folder)


def test_tokenizer_that_is_json_of_something_else_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", layouts()["llama-2"] | {"tokenizer.json": "{}"})
    with pytest.raises(TokenizerRefused, match=f"^{folder / 'tokenizer.json'}: "):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("tokenizer_config.json", {"chat_template": BROKEN}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": BROKEN}]}),
        ("chat_template.json", {"chat_template": BROKEN}),
    ],
)
def test_chat_template_that_is_cut_short_is_named_by_its_file(name: str, stated: object, tmp_path: Path) -> None:
    ready = layouts()["qwen2.5"]["tokenizer.json"]
    folder = write(tmp_path / "model", {"config.json": {"model_type": "qwen2"}, "tokenizer.json": ready, name: stated})
    with pytest.raises(TokenizerRefused, match=f"^{folder / name}: TemplateSyntaxError: "):
        read_tokenizer(folder)
