"""Stop strings: against a character-by-character oracle, however the text is cut into tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.stop_strings import PassedTokens, StopFilter

TEXTS = st.text(alphabet="ab|", max_size=20)
STOPS = st.lists(st.text(alphabet="ab|", min_size=1, max_size=5), max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first stop begins: the first to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


def run(pieces: list[str], stops: tuple[str, ...], tail: str = "") -> tuple[list[PassedTokens], StopFilter]:
    stop_filter = StopFilter(stops)
    out = [stop_filter.push(index, text) for index, text in enumerate(pieces)]
    return [*out, stop_filter.finish(tail)], stop_filter


def text_of(out: list[PassedTokens]) -> str:
    return "".join(piece.text for piece in out)


def tokens_of(out: list[PassedTokens]) -> list[int]:
    return [token_id for piece in out for token_id in piece.token_ids]


@settings(max_examples=120, deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS, TEXTS)
def test_text_ends_where_the_first_stop_begins(pieces: list[str], stops: tuple[str, ...], tail: str) -> None:
    out, stop_filter = run(pieces, stops, tail)
    whole = "".join(pieces) + tail
    match = first_stop(whole, stops)
    assert text_of(out) == (whole if match is None else whole[: match[0]])
    assert stop_filter.matched == (None if match is None else match[1])


@settings(max_examples=120, deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS)
def test_kept_tokens_begin_before_the_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    out, _ = run(pieces, stops)
    match = first_stop("".join(pieces), stops)
    begins = [len("".join(pieces[:index])) for index in range(len(pieces))]
    expected = [i for i, begin in enumerate(begins) if match is None or begin < match[0]]
    assert tokens_of(out) == expected


@settings(max_examples=120, deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS)
def test_nothing_goes_out_that_may_belong_to_a_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    stop_filter = StopFilter(stops)
    gone = seen = ""
    for index, text in enumerate(pieces):
        gone += stop_filter.push(index, text).text
        seen += text
        for stop in stops:  # had the stop been completed now, it would begin at or after what went out
            for length in range(1, len(stop)):
                if seen.endswith(stop[:length]) and stop_filter.matched is None:
                    assert len(gone) <= len(seen) - length


def test_text_without_stops_is_sent_immediately() -> None:
    out, _ = run(["a", "", "b"], (), "c")
    assert out == [PassedTokens((0,), "a"), PassedTokens((1,), ""), PassedTokens((2,), "b"), PassedTokens((), "c")]


def test_possible_beginning_is_held_back_with_its_tokens() -> None:
    stop_filter = StopFilter(("END",))
    assert stop_filter.push(1, "x") == PassedTokens((1,), "x")
    assert stop_filter.push(2, " E") == PassedTokens((2,), " ")
    assert stop_filter.push(3, "N") == PassedTokens((), "")
    assert stop_filter.push(4, "x") == PassedTokens((3, 4), "ENx")


def test_token_without_text_waits_for_its_text() -> None:
    stop_filter = StopFilter(("é",))
    assert stop_filter.push(1, "") == PassedTokens((), "")
    assert stop_filter.push(2, "é") == PassedTokens((), "")
    assert stop_filter.matched == "é"


def test_nothing_is_sent_after_a_match() -> None:
    stop_filter = StopFilter(("b",))
    assert stop_filter.push(1, "abc") == PassedTokens((1,), "a")
    assert stop_filter.push(2, "d") == PassedTokens((), "")
    assert stop_filter.finish("e") == PassedTokens((), "")


def test_first_tokens_are_part_of_no_stop_before_min_tokens() -> None:
    stop_filter = StopFilter(("ab",), min_tokens=2)
    assert stop_filter.push(1, "ab") == PassedTokens((1,), "ab")
    assert stop_filter.push(2, "a") == PassedTokens((2,), "a")  # not held back, though a stop might begin with it
    assert stop_filter.push(3, "b") == PassedTokens((3,), "b")
    assert stop_filter.push(4, "xab") == PassedTokens((4,), "x")
    assert stop_filter.matched == "ab"
