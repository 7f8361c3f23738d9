"""The exactness benchmark draws the same requests for the same seed, and notices a single wrong bit."""

from dataclasses import replace

import pytest

from baton.lab.chaos.exactness.__main__ import compare
from baton.lab.chaos.exactness.answers import ExactChoice
from baton.lab.chaos.exactness.courses import Course, CourseAnswers
from baton.lab.chaos.exactness.requests import ExactRequest, random_requests, sampling_params

ANSWER = ExactChoice(0, (5, 6), "ab", "length", None, (((5, b"\x00\x00\x80\xbf"),), ()))
COURSE = Course("1P+1D", "float32")


def test_requests_are_the_same_for_a_seed_and_of_all_kinds() -> None:
    asked = random_requests(7, 300)
    assert asked == random_requests(7, 300)
    assert asked != random_requests(8, 300)
    named = {name for each in asked for name in each.options}
    assert named >= {"n", "logprobs", "stop", "regex", "choice", "json_schema", "logit_bias", "top_p"}
    for each in asked:
        sampling_params(each.options)


@pytest.mark.parametrize(
    "other",
    [
        replace(ANSWER, token_ids=(5, 7)),
        replace(ANSWER, token_ids=(5, 6, 7)),
        replace(ANSWER, token_ids=(5,)),
        replace(ANSWER, text="aB"),
        replace(ANSWER, finish_reason="stop"),
        replace(ANSWER, logprobs=(((5, b"\x01\x00\x80\xbf"),), ())),
    ],
)
def test_every_difference_is_counted(other: ExactChoice) -> None:
    asked = [ExactRequest("one", {}), ExactRequest("two", {})]
    made = CourseAnswers([(ANSWER,), (other,)])
    assert compare(COURSE, asked, [(ANSWER,), (ANSWER,)], made, 1.0).differing == 1
    assert compare(COURSE, asked, [(ANSWER,), (ANSWER,)], CourseAnswers([(ANSWER,), (ANSWER,)]), 1.0).differing == 0
