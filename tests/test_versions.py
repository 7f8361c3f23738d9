"""Which releases work together."""

from dataclasses import replace

import pytest

from baton.versions import OWN, UNANNOUNCED, Versions, announced, differing, refusal

THIS = Versions("3.1.0", 7, 6)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Versions("3.0.0", 6, 5), id="the release before"),
        pytest.param(Versions("3.2.0", 8, 7), id="the release after"),
        pytest.param(Versions("9.0.0", 9, 1), id="a far one that still speaks it"),
        pytest.param(THIS, id="the same"),
    ],
)
def test_releases_with_a_protocol_in_common_work_together(other: Versions) -> None:
    assert refusal(THIS, other) == refusal(other, THIS) == ""


@pytest.mark.parametrize("other", [Versions("2.0.0", 5, 5), Versions("4.0.0", 9, 8)])
def test_others_are_refused_by_both_with_both_versions_named(other: Versions) -> None:
    for why in (refusal(THIS, other), refusal(other, THIS)):
        assert str(THIS) in why and str(other) in why


def test_release_without_announcement_speaks_protocol_1() -> None:
    assert announced() == UNANNOUNCED == Versions("", 1, 1)
    assert refusal(replace(OWN, oldest_protocol=1), UNANNOUNCED) == ""
    assert "before 0.2.0" in refusal(THIS, UNANNOUNCED)


def test_differing_names_words_of_both_layouts() -> None:
    mine, theirs = "order=block,layer layers=2 dtype=float32", "order=block,layer layers=2 dtype=int8 scales=token"
    assert differing(mine, theirs) == ("dtype=float32", "dtype=int8 scales=token")
    assert differing("layers=2", "layers=2 more=1") == ("nothing more", "more=1")
