"""What a router learns of each answer in a step with drafted tokens."""

from baton.decode_worker.drafted import StepDrafts
from baton.engine.runner.step_records import DraftPart, StepRecord
from baton.engine.scheduler.speculation import StepPrices
from baton.protos import session_pb2
from baton.worker.times import RequestTimes

STEP = StepRecord(0.0, 0.012, drafts=(DraftPart(1, 0, 3),), prices=StepPrices(plain_s=0.010, longer_s=0.002))


def batch_of(*made: tuple[int, int], times: dict[int, RequestTimes]) -> session_pb2.StepOutputs:
    """`made`: request and choice of each token, in order."""
    drafts, batch = StepDrafts(STEP), session_pb2.StepOutputs()
    last = None
    for request_id, choice in made:
        if last != (request_id, choice):
            batch.outputs.add(attempt_id=request_id, choice=choice)
        last = request_id, choice
        drafts.take(request_id, choice, batch, times.setdefault(request_id, RequestTimes()))
    drafts.write()
    return batch


def figures(message: session_pb2.Drafts) -> tuple[int, int, int, float]:
    return message.output, message.drafted_tokens, message.accepted_tokens, round(message.saved_ms, 6)


def test_accepted_tokens_save_a_step_each_and_all_answers_wait_for_longer_ones() -> None:
    times: dict[int, RequestTimes] = {}
    batch = batch_of((1, 0), (1, 0), (1, 0), (2, 0), times=times)
    assert [figures(each) for each in batch.drafts] == [(0, 3, 2, 18.0), (1, 0, 0, -2.0)]
    assert (times[1].drafted_tokens, times[1].accepted_tokens, times[2].drafted_tokens) == (3, 2, 0)


def test_other_choice_of_the_request_has_no_share_in_drafts() -> None:
    batch = batch_of((1, 0), (1, 1), times={})
    assert [figures(each) for each in batch.drafts] == [(0, 3, 0, -2.0), (1, 0, 0, -2.0)]
