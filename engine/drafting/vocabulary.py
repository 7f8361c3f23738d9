"""Check that two models have the same token ids; otherwise a draft's ids would stand for other text."""

from pathlib import Path

from baton.engine.config.model_config import ModelError
from baton.text.host.files import MAX_TOKENIZER_BYTES, check_file, reads

TOKENIZER_FILE = "tokenizer.json"


def check_same_vocabulary(folder: Path, vocab_size: int, draft: Path, draft_vocab_size: int) -> None:
    """Compare a model and its draft model. Raises: ModelError, naming both."""
    if vocab_size != draft_vocab_size:
        raise ModelError(
            f"the draft model {draft} has a vocabulary of {draft_vocab_size} tokens, but {folder} has {vocab_size}"
        )
    if _file(folder).read_bytes() == _file(draft).read_bytes():
        return
    own, other = _token_ids(folder), _token_ids(draft)
    if own != other:
        token, token_id = min(own.items() ^ other.items(), key=lambda pair: (pair[1], pair[0]))
        where = folder if own.get(token) == token_id else draft
        raise ModelError(
            f"the draft model {draft} has other token ids than {folder}: {token_id} is {token!r} only in {where}"
        )


@reads(ModelError, TOKENIZER_FILE)
def _token_ids(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer  # slow to import, rarely needed: the files are usually equal

    check_file(_file(folder), MAX_TOKENIZER_BYTES)
    ids: dict[str, int] = Tokenizer.from_file(str(_file(folder))).get_vocab(with_added_tokens=True)
    return ids


def _file(folder: Path) -> Path:
    """Return the path of the folder's tokenizer file. Raises: ModelError."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise ModelError(f"{folder} has no {TOKENIZER_FILE}, whose ids a model and its draft model must share")
    return file
