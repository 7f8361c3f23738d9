"""Check that two models have the same token ids; otherwise a draft's ids would stand for other text."""

from pathlib import Path

from baton.engine.config.model_config import ModelError
from baton.text.host.files import reads
from baton.text.tokenizer.checkpoint_tokenizer import CheckpointTokenizer, read_tokenizer


def check_same_vocabulary(folder: Path, vocab_size: int, draft: Path, draft_vocab_size: int) -> None:
    """Compare a model and its draft model. Raises: ModelError, naming both."""
    if vocab_size != draft_vocab_size:
        raise ModelError(
            f"the draft model {draft} has a vocabulary of {draft_vocab_size} tokens, but {folder} has {vocab_size}"
        )
    read, read_draft = _read(folder), _read(draft)
    if read.json == read_draft.json:
        return
    own, other = (each.tokenizer().get_vocab(with_added_tokens=True) for each in (read, read_draft))
    if own != other:
        token, token_id = min(own.items() ^ other.items(), key=lambda pair: (pair[1], pair[0]))
        where = folder if own.get(token) == token_id else draft
        raise ModelError(
            f"the draft model {draft} has other token ids than {folder}: {token_id} is {token!r} only in {where}"
        )


@reads(ModelError)
def _read(folder: Path) -> CheckpointTokenizer:
    return read_tokenizer(folder)
