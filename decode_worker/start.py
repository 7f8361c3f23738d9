"""The contents of a Start command, read before anything is done. Does no I/O."""

from decode_worker.answer import Answer, Session
from decode_worker.credits import Charge
from decode_worker.kept import KeptAnswer
from protos import session_pb2


def answer_to(command: session_pb2.Start, request_id: int, session: Session, block_tokens: int) -> Answer:
    sampling, first_choice = command.sampling, command.first_choice
    answered = command.token_ids[len(command.token_ids) - command.answered_tokens :]
    return Answer(
        request_id,
        session,
        command.attempt_id,
        KeptAnswer(answered, with_logprobs=sampling.HasField("logprobs")),
        running_choices=set(range(first_choice, first_choice + sampling.n)),
        searches=sampling.beam_width > 0,
        charge=Charge.of(
            len(command.token_ids),
            sampling.max_tokens - command.answered_tokens,
            max(sampling.n, sampling.beam_width),
            block_tokens,
        ),
        last_block=command.block_hashes[-1] if command.block_hashes else b"",
    )


def fits(command: session_pb2.Start, model: session_pb2.ModelInfo) -> bool:
    length = len(command.token_ids) - command.answered_tokens + command.sampling.max_tokens
    known = len(command.token_ids) > 0 and max(command.token_ids) < model.vocab_size
    return known and length <= model.max_model_len and command.sampling.n >= 1
