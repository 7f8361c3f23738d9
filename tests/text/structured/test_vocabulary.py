"""Vocabulary: bytes of tokens for grammars, as a model's tokenizer has them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.text.structured.library import MAX_ADDED_TOKENS, Vocabulary, compile_form, next_tokens
from baton.text.structured.output import StructuredKind, StructuredOutput


def test_a_tokenizer_of_mostly_added_tokens_has_the_bytes_of_each() -> None:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(symbols)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    plain = [f"token{number};" for number in range(2 * MAX_ADDED_TOKENS)]
    tokenizer.add_tokens([AddedToken(each) for each in plain])
    end = tokenizer.token_to_id("<end>")

    vocabulary = Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])

    assert end in vocabulary.special
    for text in plain:
        assert vocabulary.tokenizer.decode_bytes([tokenizer.token_to_id(text)]) == text.encode(), text
        assert tokenizer.token_to_id(text) not in vocabulary.special, text
    matcher = compile_form(StructuredOutput(StructuredKind.REGEX, "[a-z]+1999[0-9];"), vocabulary)
    allowed = int.from_bytes(next_tokens(matcher), "little")
    assert allowed >> tokenizer.token_to_id("token19990;") & 1
    assert not allowed >> tokenizer.token_to_id("token2;") & 1
