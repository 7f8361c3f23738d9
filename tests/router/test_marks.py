"""Where texts may be cut: which added tokens are marks, and what the parts are."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from baton.router.model.chat_template import ChatTemplate
from baton.router.model.marks import MOST_MARKS, UNCUT, Marks, TextPart, find_marks
from tests.fixtures.trained_tokenizers import BEGIN, END, SAMPLES, TURN, trained
from tests.router.tokenizers_for_tests import byte_level

EVERY = "abcdefghijklmnopqrstuvwxyz<>/[]|_ "


def tokenizer_with(*added: AddedToken | str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(EVERY)}, merges=[]))
    for token in added:
        tokenizer.add_special_tokens([token])
    return tokenizer


def marked(marks: Marks) -> set[str]:
    """Those of some candidates that a text is cut behind."""
    candidates = (
        "<a>", "<b>", "<abc>", "<c", "word", "<left>", "<right>", "<both>", "[ab]", "[ab]{", "aba", "\n\n", "Normal",
        TURN, END, BEGIN,
    )  # fmt: skip
    return {text for text in candidates if marks.pattern.fullmatch(text)}


def test_tokens_found_in_any_context_are_marks() -> None:
    assert marked(find_marks(tokenizer_with("<a>", "<b>"), None)) == {"<a>", "<b>"}


@pytest.mark.parametrize("other", ["<abc>>", "x<abc>", "bc", "c>y", "y<a", "<abc>"])
def test_token_that_others_may_overlap_is_no_mark(other: str) -> None:
    added = [AddedToken("<abc>", normalized=False), AddedToken(other, normalized=False)]
    assert ("<abc>" in marked(find_marks(tokenizer_with(*added), None))) == (other == "<abc>")


def test_token_that_may_overlap_a_second_one_is_no_mark() -> None:
    assert find_marks(tokenizer_with("aba"), None) is UNCUT


@pytest.mark.parametrize("token", [AddedToken("<a>", single_word=True), AddedToken("<a>", normalized=True)])
def test_context_dependent_token_is_no_mark(token: AddedToken) -> None:
    assert find_marks(tokenizer_with(token), None) is UNCUT


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "demo"])
def test_marks_of_each_family_of_tokenizers(name: str) -> None:
    assert marked(find_marks(trained(name), None)) == {TURN, END, BEGIN, "<left>", "<right>", "<both>"}


def test_tokenizer_that_draws_lots_has_no_marks() -> None:
    tokenizer = tokenizer_with("<a>")
    tokenizer.model.dropout = 0.5
    assert find_marks(tokenizer, None) is UNCUT


def test_tokenizer_that_repeats_the_text_has_no_marks() -> None:
    tokenizer = tokenizer_with("<a>")
    tokenizer.post_processor = processors.TemplateProcessing("$A $A", "$A $B", [])
    assert find_marks(tokenizer, None) is UNCUT


def test_tokens_that_are_put_around_a_text_are_known() -> None:
    marks = find_marks(trained("byte_level"), None)
    ids = [trained("byte_level").token_to_id(token) for token in (BEGIN, END)]
    assert [*marks.before, *marks.after] == ids and len(marks.before) == 1


def test_only_tokens_of_the_template_are_marks() -> None:
    many = [f"<{one}{other}>" for one in "abcdef" for other in "ghijk"]
    template = ChatTemplate("{{ messages }}<fk>{{ bos_token }}", {"bos_token": "<ek>"})
    marks = find_marks(tokenizer_with(*many), template)
    found = [token for token in many if marks.pattern.fullmatch(token)]
    assert len(found) == MOST_MARKS and {"<fk>", "<ek>"} < set(found)
    assert marks.pattern.fullmatch("<fj>") is None


def test_parts_are_of_a_size_and_end_with_marks() -> None:
    found = find_marks(byte_level(), None)
    marks = Marks(found.pattern, found.before, found.after, part_characters=4)
    end = "<|end|>"
    text = f"a{end}bcd{end}e{end}"
    assert marks.parts(text) == [TextPart(0, 0, 18), TextPart(11, 18, 26)]
    assert [text[part.begin : part.end] for part in marks.parts(text)] == [f"a{end}bcd{end}", f"e{end}"]


def test_longer_text_has_the_parts_of_its_prefix() -> None:
    found = find_marks(byte_level(), None)
    marks = Marks(found.pattern, found.before, found.after, part_characters=4)
    text = "<|end|>ab<|end|>cdefg<|<|end|>hij<|end" * 5
    for size in range(len(text) + 1):
        shorter, whole = marks.parts(text[:size]), marks.parts(text)
        assert whole[: len(shorter) - 1] == shorter[:-1]


def test_text_without_marks_is_one_part() -> None:
    assert UNCUT.parts("<|end|>" * 1000) == [TextPart(0, 0, 7000)]
    assert find_marks(byte_level(), None).parts("x" * 10_000) == [TextPart(0, 0, 10_000)]
