"""The simulated model's tokenizer: every byte is a token, so that characters are cut in two now and then."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.defaults import GenerationDefaults
from router.detokenizer import Detokenizer
from router.served_model import ServedModel
from router.structured import FormChecker
from router.tokenizer import TokenizerWorker
from router.worker import WorkerDescription
from simulation.host import FOLDER
from simulation.model import END_TOKEN


@cache
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


@cache
def _worker() -> TokenizerWorker:
    return TokenizerWorker(tokenizer(), None)


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=True))


def detokenizer() -> Detokenizer:
    return _worker().detokenizer()


def served_model(description: WorkerDescription, folder: Path | None, name: str | None) -> ServedModel:
    """In place of load_served_model."""
    model = description.model
    defaults = GenerationDefaults(eos_token_ids=frozenset({END_TOKEN}))
    return ServedModel(
        name=model.name,
        fingerprint=description.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        block_tokens=model.block_tokens,
        tokenizer=_worker(),
        defaults=defaults,
        forms=FormChecker(FOLDER, model.vocab_size, defaults.eos_token_ids),
    )
