"""Tokens that one step makes of one choice go out as one output, as those of other choices beside them do."""

from baton.decode_worker.answer import extends_last
from baton.protos import session_pb2


def output(attempt_id: int, choice: int, offset: int, token_id: int, **ends: int) -> session_pb2.SequenceOutput:
    return session_pb2.SequenceOutput(
        attempt_id=attempt_id, choice=choice, offset=offset, token_ids=[token_id], logprobs=[-0.5], **ends
    )


def batch_of(*outputs: session_pb2.SequenceOutput) -> list[session_pb2.SequenceOutput]:
    batch = session_pb2.StepOutputs()
    for each in outputs:
        if not extends_last(batch, each):
            batch.outputs.append(each)
    return list(batch.outputs)


def test_tokens_of_one_choice_are_joined_in_order() -> None:
    stop = session_pb2.END_REASON_STOP
    [joined] = batch_of(output(1, 0, 7, 50), output(1, 0, 8, 51), output(1, 0, 9, 52, end=stop))
    assert (joined.offset, list(joined.token_ids), list(joined.logprobs), joined.end) == (
        7,
        [50, 51, 52],
        [-0.5, -0.5, -0.5],
        stop,
    )


def test_other_choices_and_requests_have_outputs_of_their_own() -> None:
    outputs = batch_of(output(1, 0, 7, 50), output(1, 1, 7, 51), output(2, 1, 3, 52))
    assert [(each.attempt_id, each.choice, each.offset) for each in outputs] == [(1, 0, 7), (1, 1, 7), (2, 1, 3)]
