"""Every golden text gives the same events, however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.output.formats.choose import FORMATS
from baton.text.output.pieces import CallArguments, ToolParser
from tests.text.output.golden_streams import Golden, fed, goldens

GOLDENS = goldens()


def reader(golden: Golden) -> ToolParser:
    return FORMATS[golden.format].reader(golden.tools)


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_whole_text_gives_its_events(golden: Golden) -> None:
    assert fed(reader(golden), [golden.text]) == golden.events


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_text_in_two_parts_gives_the_same_events(golden: Golden) -> None:
    for cut in range(len(golden.text) + 1):
        parts = [golden.text[:cut], golden.text[cut:]]
        assert fed(reader(golden), parts) == golden.events, parts


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_text_character_by_character_gives_the_same_events(golden: Golden) -> None:
    assert fed(reader(golden), golden.text) == golden.events


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_text_in_any_parts_gives_the_same_events(data: st.DataObject) -> None:
    golden = data.draw(st.sampled_from(GOLDENS))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(golden.text)), max_size=12)))
    parts = [golden.text[begin:end] for begin, end in pairwise([0, *cuts, len(golden.text)])]
    assert fed(reader(golden), parts) == golden.events, parts


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_broken_texts_give_equal_events_for_any_cut(data: st.DataObject) -> None:
    """Golden texts with a part taken out, doubled or put elsewhere: what models write that err."""
    golden = data.draw(st.sampled_from(GOLDENS))
    places = st.integers(0, len(golden.text))
    begin, end = sorted((data.draw(places), data.draw(places)))
    place = data.draw(places)
    rest = golden.text[:begin] + golden.text[end:]
    text = rest[:place] + data.draw(st.sampled_from(["", golden.text[begin:end], golden.text])) + rest[place:]
    whole = fed(reader(golden), [text])
    assert fed(reader(golden), text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert fed(reader(golden), [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_calls_in_golden_texts_and_their_arguments_are_json(name: str) -> None:
    events = [event for golden in GOLDENS if golden.format == name for event in golden.events]
    calls = [arguments for kind, arguments in events if kind not in ("text", "thought")]
    whole = [arguments for arguments in calls if arguments.endswith("}")]
    assert len(whole) >= 3
    assert all(isinstance(json.loads(arguments), dict) for arguments in whole)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_streamed_as_they_are_written(name: str) -> None:
    longest = max(
        (golden for golden in GOLDENS if golden.format == name and golden.events[0][0] in golden.tools),
        key=lambda golden: len(golden.events[0][1]),
    )
    parser = reader(longest)
    pieces = [piece for letter in longest.text for piece in parser.push(letter)]
    assert sum(isinstance(piece, CallArguments) for piece in pieces) > 4
