"""Tokenizers in the layouts of published models: server and offline engine read them as transformers does."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from baton.engine.offline.prompts import PromptEncoder
from baton.router.model.served_model import TokenizerWorker, load_tokenizer
from baton.router.types.request import ChatPrompt, Message, PairPrompt, TextPrompt, TokenPrompt
from baton.text.detokenizer import Detokenizer, clean_spaces, silent_token_ids
from baton.text.tokenizer import checkpoint_tokenizer, convert
from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer
from tests.fixtures.tokenizer_layouts import Files, layouts, other_formats, write

TEXTS = (
    "Hello, world! I'm fine .  ",
    "<s>a</s> <|im_end|>x<|endoftext|>[SEP]<tool_call>",
    "naïve 日本 🦊\n\nx",
    " lead",
    "it 's n't",
)
MESSAGES = ({"role": "user", "content": "Hi <|im_end|> é"}, {"role": "assistant", "content": "yes"})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write(tmp_path / "model", layouts()[request.param])


@pytest.fixture
def served(folder: Path) -> Iterator[TokenizerWorker]:
    tokenizer = load_tokenizer(folder)
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("folder", layouts(), indirect=True)
async def test_layout_is_read_as_transformers_reads_it(folder: Path, served: TokenizerWorker) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    offline = PromptEncoder(folder, 1 << 20)
    for text in TEXTS:
        ids, bare = theirs(text)["input_ids"], theirs(text, add_special_tokens=False)["input_ids"]
        assert await served.encode(text, True) == tuple(ids) == offline.read([text])[0].token_ids
        assert await served.encode(text, False) == tuple(bare) == tuple(offline.encode(text))
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip)
            assert await served.decode(tuple(ids), skip) == decoded == offline.decoder.decode(ids, skip)
    pair = theirs("a b", "c d")["input_ids"]
    assert (await served.encode_pair(PairPrompt("a b", "c d"), None))[0] == tuple(pair)
    assert offline.read_pair("a b", "c d", as_pair=True).token_ids == tuple(pair)


@pytest.mark.parametrize("folder", layouts(), indirect=True)
async def test_prompt_of_layout_is_that_of_transformers(folder: Path, served: TokenizerWorker) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    if (path := folder / "chat_template.json").exists():
        theirs.chat_template = json.loads(path.read_text())["chat_template"]
    offline = PromptEncoder(folder, 1 << 20)
    if theirs.chat_template is None:
        assert served.chat_template is None
        with pytest.raises(ValueError, match="no chat template named default"):
            offline.read_chat(MESSAGES, True)
        return
    assert served.chat_template is not None
    asked = tuple(Message(each["role"], each["content"]) for each in MESSAGES)
    for tools in ([], [TOOL]):
        prompt = theirs.apply_chat_template(
            list(MESSAGES), tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert await served.chat_template.render(asked, tools) == prompt
        assert offline.read_chat(MESSAGES, True, tools or None).text == prompt
        ids = tuple(theirs(prompt, add_special_tokens=False)["input_ids"])
        if not tools or served.chat_template.shows_tools:  # others show tools in Baton's own format
            assert await served.prompt_tokens(ChatPrompt(asked, tools=tuple(tools))) == ids
        assert offline.read_chat(MESSAGES, True, tools or None).token_ids == ids


@pytest.mark.parametrize("folder", layouts(), indirect=True)
def test_end_tokens_unite_both_configurations_and_the_tokenizer(folder: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    config, stated = json.loads((folder / "config.json").read_text()), set[int]()
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    for each in (config, config.get("text_config", {}), generation):
        ids = each.get("eos_token_id")
        stated |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    own = set() if theirs.eos_token_id is None else {theirs.eos_token_id}
    ends = read_tokenizer(folder).end_token_ids
    assert ends == stated | own if stated else ends >= own


async def test_answers_end_at_the_tokenizers_own_end_token(tmp_path: Path) -> None:
    folder = write(tmp_path, layouts()["end-of-the-tokenizer-alone"])
    tokenizer = read_tokenizer(folder).tokenizer()
    assert tokenizer.token_to_id("<|eot_id|>") in read_tokenizer(folder).end_token_ids
    assert tokenizer.token_to_id("<|end_of_text|>") in read_tokenizer(folder).end_token_ids


EXPECTED = {
    "gemma-tokenizer.model": "db18697e250c8953",
    "llama-2-tokenizer.model": "a010a7ecf4b04f87",
    "llama-3-tiktoken": "ebcb8ad9ae7905f1",
    "mistral-v1-tokenizer.model": "1633ab892e60caad",
    "t5-like-spiece.model": "e537e1e73fc05d0a",
    "tiktoken.model": "ebcb8ad9ae7905f1",
    "xlm-roberta-sentencepiece": "81503355dce39270",
}


@pytest.mark.parametrize("name", other_formats())
def test_file_of_sentencepiece_or_tiktoken_is_read_without_their_packages(name: str, tmp_path: Path) -> None:
    """The expected ids are those of transformers 5.23 with sentencepiece 0.2.3 and tiktoken 0.14."""
    tokenizer = read_tokenizer(write(tmp_path, other_formats()[name])).tokenizer()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == EXPECTED[name], ids


@pytest.mark.parametrize(
    ("stated", "config", "limit"),
    [
        ({"max_seq_length": 12}, {}, 12),
        ({"max_seq_length": 12, "do_lower_case": True}, {"model_max_length": 8}, 12),
        ({}, {"model_max_length": 20}, 20),
        ({"max_seq_length": None}, {"model_max_length": 1e30}, 24),
    ],
)
async def test_text_to_embed_is_cut_as_by_sentence_transformers(
    stated: dict[str, Any], config: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    files = layouts()["minilm"]
    files = files | {
        "sentence_bert_config.json": stated,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | config,
        "config.json": {"model_type": "bert", "max_position_embeddings": 24},
    }
    folder = write(tmp_path, files)
    theirs, served, offline = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), PromptEncoder(folder, 1000)
    for text in (TEXTS[0], "Short", "The quick BROWN fox " * 40, "x" * 30_000):
        ids = tuple(theirs(text, truncation="longest_first", max_length=limit)["input_ids"])
        assert offline.read_cut([text])[0].token_ids == ids
        assert await served.cut(TextPrompt(text)) == TokenPrompt(ids)
    served.close()


@pytest.mark.parametrize("limit", [5, 12, 13, 24])
async def test_pair_of_a_reranker_is_cut_as_by_sentence_transformers(limit: int, tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "max_position_embeddings": 24}
    files = layouts()["bert"] | {
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": limit},
        "config.json": config | {"id2label": {"0": "LABEL_0"}},
    }
    folder = write(tmp_path, files)
    theirs, served, offline = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), PromptEncoder(folder, 1000)
    texts = ("Hi", TEXTS[0], "The quick BROWN fox " * 40, "x" * 30_000)
    for query, document in itertools.product(texts, texts):
        cut = theirs(query, document, truncation=True, max_length=limit)
        ids, types = tuple(cut["input_ids"]), cut["token_type_ids"]
        prompt = offline.read_pair(query, document, as_pair=True)
        assert prompt.token_ids == ids and prompt.second_from == types.index(1)
        assert await served.encode_pair(PairPrompt(query, document), limit) == (ids, types.index(1))
    served.close()


async def test_text_to_embed_is_not_cut_without_modules_of_sentence_transformers(tmp_path: Path) -> None:
    served = load_tokenizer(write(tmp_path, layouts()["bert"]))
    assert await served.cut(TextPrompt("x" * 999)) == TextPrompt("x" * 999)
    served.close()


def test_lower_casing_of_sentence_transformers_precedes_the_normalizer(tmp_path: Path) -> None:
    modules = layouts()["minilm"]["modules.json"]
    files = layouts()["gpt2"] | {"modules.json": modules, "sentence_bert_config.json": {"do_lower_case": True}}
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, files))
    tokenizer = read_tokenizer(tmp_path).tokenizer()
    assert tokenizer.encode("The QUICK Brown É").ids == theirs("the quick brown é")["input_ids"]


def test_conversion_in_a_process_without_torch_is_the_same(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, files) for name, files in layouts().items()]
    code = (
        "import sys, hashlib; from pathlib import Path; sys.modules['torch'] = None\n"
        "from baton.text.tokenizer.convert import convert\n"
        "print(*(hashlib.sha256(convert(Path(each))).hexdigest() for each in sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, folders)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [hashlib.sha256(convert.convert(each)).hexdigest() for each in folders]


def test_second_reading_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(convert, "MODULE", "a module that is never imported")
    folder = write(tmp_path / "model", layouts()["qwen2.5"])
    first = read_tokenizer(folder)
    monkeypatch.setattr(checkpoint_tokenizer, "_converted", lambda folder: pytest.fail("converted again"))
    assert read_tokenizer(folder) == first
    monkeypatch.setattr(checkpoint_tokenizer, "_converted", convert.convert)
    (folder / "tokenizer_config.json").write_text("{}")
    assert read_tokenizer(folder) != first


def test_conversion_without_a_writable_cache_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(convert, "MODULE", "a module that is never imported")
    folder = write(tmp_path / "model", layouts()["gpt2"])
    assert read_tokenizer(folder).json == convert.convert(folder).partition(b"\n")[2].decode()


CODE = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": {"model_type": "llama"}}, "there is no tokenizer: no tokenizer.json"),
        ({"config.json": {"model_type": "bert"}, "requirements.txt": "x"}, "there is no tokenizer: no tokenizer.json"),
        ({"config.json": {"model_type": "bert"}, "lid.model": "x"}, "there is no tokenizer: none of .*vocab.txt"),
        (
            {"config.json": {"model_type": "own"}, "tokenizer_config.json": CODE, "qwen.tiktoken": "IQ== 0\n"},
            "its class is code of the checkpoint, which never runs; save a tokenizer.json",
        ),
        ({"config.json": {"model_type": "llama"}, "tokenizer.json": "{"}, "model"),
        ({"config.json": {"model_type": "llama"}, "tokenizer.model": "no such format"}, "model"),
    ],
)
def test_unreadable_tokenizer_is_refused_by_name(files: Files, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", files)
    with pytest.raises(TokenizerRefused, match=reason) as refused:
        read_tokenizer(folder)
    assert str(folder) in str(refused.value)


def test_reason_of_another_process_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "MODULE", "a module that is never imported")
    files = {"config.json": {"model_type": "own"}, "tokenizer_config.json": CODE, "qwen.tiktoken": "IQ== 0\n"}
    folder = write(tmp_path / "model", files)
    with pytest.raises(TokenizerRefused, match="model: its tokenizer cannot be read: its class is code of the"):
        read_tokenizer(folder)


def test_code_of_the_checkpoint_is_not_needed_with_a_tokenizer_json(tmp_path: Path) -> None:
    ready = layouts()["qwen2.5"]["tokenizer.json"]
    files = {"config.json": {"model_type": "own"}, "tokenizer_config.json": CODE, "tokenizer.json": ready}
    found = read_tokenizer(write(tmp_path, files))
    assert found.tokenizer().encode(TEXTS[1]).ids == Tokenizer.from_str(ready).encode(TEXTS[1]).ids


@given(st.lists(st.text(" '.nt,mvresa?!", max_size=4)))
def test_cleaned_pieces_add_up_to_the_cleaned_text(words: list[str]) -> None:
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys([*filter(None, words), "?unk"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?unk"))
    tokenizer.decoder = decoders.Fuse()
    ids = [vocabulary[word] for word in words if word]
    streamed = Detokenizer(tokenizer, silent_token_ids(tokenizer), cleans_spaces=True)
    assert "".join(map(streamed.push, ids)) + streamed.finish() == clean_spaces("".join(words))
    streamed = Detokenizer(tokenizer, silent_token_ids(tokenizer), cleans_spaces=True)
    assert streamed.push_all(ids) + streamed.finish() == clean_spaces("".join(words))
