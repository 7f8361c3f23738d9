"""Bounds of all messages from a router to a worker. A check takes time proportional to the size of the message."""

import re

from baton.process.foreign_text import ADAPTER_NAME, IDENTIFIER, MAX_ID_CHARACTERS
from baton.process.registry.worker_record import MOST_GRACE_S, MOST_LISTED, WEIGHTS
from baton.process.wire_bounds import (
    Bounds,
    OutOfBounds,
    Rule,
    anything,
    endpoint,
    entries,
    mapping,
    number,
    numbers,
    size,
    text,
)
from baton.protos import session_pb2
from baton.text.block_hash import HASH_BYTES
from baton.text.sampling import (
    BIASES,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
)
from baton.text.structured.output import MAX_BYTES

ROUTER_ID_BYTES = TRANSFER_ID_BYTES = SESSION_ID_BYTES = 16
OWNER_BYTES = 8
MOST_FORM_CHARACTERS = 16 * MAX_BYTES  # maximum length of a schema, regex or grammar, JSON escapes included
MOST_PATH_CHARACTERS = 4096
MOST_SESSION_BLOCKS = 1 << 17  # maximum number of KV blocks that a draining worker hands over per session
PATH = re.compile(r"[^\x00]*")
NAME = re.compile(f"{ADAPTER_NAME.pattern}|{re.escape(WEIGHTS)}")
OWN_STOPS = 64  # maximum number of the model's stop tokens, in addition to the request's


def _rules(worker: session_pb2.WorkerInfo) -> dict[str, Rule]:
    model = worker.model
    most_id = max(0, model.vocab_size - 1)
    token = number(0, most_id)
    blocks = model.max_model_len // max(1, model.block_size)
    one_prompt: dict[str, Rule] = {
        "attempt_id": anything,  # any 64 bits, chosen by the router
        "transfer_id": size(TRANSFER_ID_BYTES),
        "token_ids": numbers(model.max_model_len, 0, most_id),
        "block_hashes": entries(blocks, size(HASH_BYTES)),
        "adapter": text(MAX_ID_CHARACTERS, NAME),
        "request_id": text(MAX_ID_CHARACTERS, IDENTIFIER),
        "first_choice": number(0, MAX_CHOICES - 1),
        "first_token_in_ms": anything,
    }
    return {
        **{f"{command}.{field}": rule for command in ("Prefill", "Start") for field, rule in one_prompt.items()},
        "Start.prefill_endpoint": endpoint,
        "Start.cache_root": size(HASH_BYTES),
        "Fetch.endpoint": endpoint,
        "Fetch.transfer_id": size(TRANSFER_ID_BYTES),
        "Fetch.load_bytes_per_s": number(),
        "KeptSession.id": size(SESSION_ID_BYTES),
        "KeptSession.owner": size(OWNER_BYTES),
        "KeptSession.keep_for_s": number(),
        "Bring.block_hashes": entries(MOST_SESSION_BLOCKS, size(HASH_BYTES)),
        "Pooling.head_token_ids": numbers(MAX_ALLOWED_TOKEN_IDS, 0, most_id),
        "Sampling.seed": anything,  # 64 random bits
        "Sampling.max_tokens": number(0, model.max_model_len),
        "Sampling.n": number(1, MAX_CHOICES),
        "Sampling.beam_width": number(1, MAX_CHOICES),
        "Sampling.logprobs": number(0, MAX_LOGPROBS),
        "Sampling.prompt_logprobs": number(0, MAX_LOGPROBS),
        "Sampling.stop_token_ids": numbers(MAX_STOP_TOKEN_IDS + OWN_STOPS, 0, most_id),
        "Sampling.allowed_token_ids": numbers(MAX_ALLOWED_TOKEN_IDS, 0, most_id),
        "Sampling.logit_bias": mapping(MAX_BIASES, token, number(BIASES.least, BIASES.most)),
        "Sampling.bad_words": entries(4 * MAX_BAD_WORDS),  # words with and without a leading space, token sequences
        "BadWord.token_ids": numbers(2 * MAX_BAD_WORD_TOKENS, 0, most_id),
        "StructuredOutput.text": text(MOST_FORM_CHARACTERS),
        "Cancel.attempt_id": anything,
        "Hello.router_id": size(ROUTER_ID_BYTES),
        "Adopt.router_id": size(ROUTER_ID_BYTES),
        "Adopt.attempt_id": anything,
        "Adopt.as_attempt_id": anything,
        "PrepareAdapter.change_id": anything,
        "PrepareAdapter.name": text(MAX_ID_CHARACTERS, NAME),
        "PrepareAdapter.path": text(MOST_PATH_CHARACTERS, PATH),
        "AdapterList.version": number(),
        "AdapterList.adapters": entries(MOST_LISTED + 1),  # one more for the model's weights
        "AdapterList.digests_in_use": entries(16 * MOST_LISTED, text(MAX_ID_CHARACTERS, IDENTIFIER)),
        "Adapter.name": text(MAX_ID_CHARACTERS, NAME),
        "Adapter.digest": text(MAX_ID_CHARACTERS, IDENTIFIER),
        "Adapter.path": text(MOST_PATH_CHARACTERS, PATH),
        "Adapter.grace_s": number(0, MOST_GRACE_S),
        "Clock.echo_us": number(),
        "Clock.kept_us": number(),
        "Clock.wall_us": number(),
    }


class CommandCheck:
    """Checks of one worker's commands."""

    def __init__(self, worker: session_pb2.WorkerInfo) -> None:
        self._bounds = Bounds(_rules(worker))
        self._model = worker.model
        self._slots = worker.total_slots or MAX_CHOICES  # a prefill worker reports 0 slots

    def hello(self, hello: session_pb2.Hello) -> None:
        """Check a greeting. Raises: OutOfBounds."""
        self._bounds.check(hello)
        if not hello.router_id:
            raise OutOfBounds(f"router_id: must be {ROUTER_ID_BYTES} bytes")

    def clock(self, clock: session_pb2.Clock) -> None:
        """Check a clock message. Raises: OutOfBounds."""
        self._bounds.check(clock)

    def command(self, message: session_pb2.ConnectRequest) -> None:
        """Check a command. Raises: OutOfBounds, which names the field."""
        match message.WhichOneof("command"):
            case "prefill":
                self._bounds.check(message.prefill)
                self._check_prompt(message.prefill)
            case "start":
                self._bounds.check(message.start)
                self._check_prompt(message.start)
                self._check_answer(message.start)
            case str(name):
                self._bounds.check(getattr(message, name))

    def _check_prompt(self, command: session_pb2.Prefill | session_pb2.Start) -> None:
        model, length, sampling = self._model, len(command.token_ids), command.sampling
        is_pooled, answered = command.HasField("pooling"), command.answered_tokens
        is_read = not is_pooled and not (isinstance(command, session_pb2.Start) and not command.prefill_endpoint)
        choices = max(sampling.n, sampling.beam_width)
        most_tokens = model.max_model_len - (not is_pooled)  # a generating request needs room for one token
        whole_blocks = length // max(1, model.block_size)
        for field, good, why in (
            ("token_ids", 0 < length <= most_tokens, f"must have 1 to {most_tokens} tokens, not {length}"),
            ("transfer_id", command.transfer_id or not is_read, f"must be {TRANSFER_ID_BYTES} bytes, not 0"),
            ("sampling.n", sampling.n, "must be at least 1"),
            ("sampling.n", choices <= self._slots, f"{choices} choices exceed the {self._slots} batch slots"),
            ("first_choice", command.first_choice + choices <= MAX_CHOICES, f"must be at most {MAX_CHOICES - choices}"),
            ("answered_tokens", not answered or answered < length, f"must be less than the {length} tokens"),
            ("block_hashes", len(command.block_hashes) in (0, whole_blocks), f"must have 0 or {whole_blocks} hashes"),
            ("pooling.second_from", command.pooling.second_from <= length, f"must be at most {length}"),
        ):
            if not good:
                raise OutOfBounds(f"{field}: {why}")

    def _check_answer(self, command: session_pb2.Start) -> None:
        if command.HasField("pooling"):
            return
        longest = len(command.token_ids) - command.answered_tokens + command.sampling.max_tokens
        if longest > self._model.max_model_len:
            raise OutOfBounds(
                f"sampling.max_tokens: prompt and answer may have {self._model.max_model_len} tokens, not {longest}"
            )


def attempt_of(message: session_pb2.ConnectRequest) -> int | None:
    """Return the attempt that a command begins; None for other commands."""
    match message.WhichOneof("command"):
        case "prefill":
            return message.prefill.attempt_id
        case "start":
            return message.start.attempt_id
    return None
