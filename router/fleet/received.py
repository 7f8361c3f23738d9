"""Validation of all messages from workers to a router. A field that is out of bounds closes the worker's link."""

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from baton.process.foreign_text import ADAPTER_NAME, IDENTIFIER, MAX_ID_CHARACTERS
from baton.process.registry.worker_record import MOST_GRACE_S, MOST_LISTED, WEIGHTS
from baton.process.wire_bounds import (
    MAX_EXACT,
    Bounds,
    OutOfBounds,
    Rule,
    anything,
    blob,
    entries,
    finites,
    number,
    numbers,
    size,
    text,
)
from baton.protos import session_pb2
from baton.text.block_hash import HASH_BYTES
from baton.text.sampling import MAX_CHOICES

MOST_VOCABULARY = MOST_BLOCKS = 1 << 24
MOST_SNAPSHOT_PARTS = 1 << 13  # maximum number of parts of a cache snapshot, enough for MOST_BLOCKS blocks
MOST_EVENT_BYTES = 1 << 20
MOST_SESSION_BLOCKS = 1 << 17
MOST_TOKENS = 1 << 22  # maximum tokens in one message, including alternatives (top log-probabilities)
MOST_WORDS = 1 << 16  # maximum characters of an error text or a name, and maximum entries of a list
MOST_PATH_CHARACTERS = 4096
MOST_MS = 1e10  # maximum duration of a stage of a request
NAME = re.compile(f"{ADAPTER_NAME.pattern}|{re.escape(WEIGHTS)}")
_NO_LOGPROB = number(-math.inf, 1.0)


def logprobs(most: int) -> Rule:
    """Return the rule for at most `most` log-probabilities. Values up to 1 pass, because of rounding errors."""

    def fault(values: Iterable[float]) -> str | None:
        return counted(values) or next((why for each in values if (why := _NO_LOGPROB(each))), None)

    counted = entries(most)
    return fault


_RULES: dict[str, Rule] = {
    **{f"{message}.attempt_id": anything for message in ("FirstStep", "PromptScores", "Landed", "Failed")},
    "AdapterPrepared.change_id": anything,
    "AdapterPrepared.refusal": text(MOST_WORDS),
    "AdapterState.version": number(),
    "AdapterState.listed": entries(MOST_LISTED + 1),
    "AdapterState.refusals": entries(MOST_LISTED + 1),
    "AdapterRefusal.why": text(MOST_WORDS),
    "Adapter.name": text(MAX_ID_CHARACTERS, NAME),
    "Adapter.digest": text(MAX_ID_CHARACTERS, IDENTIFIER),
    "Adapter.path": text(MOST_PATH_CHARACTERS),
    "Adapter.grace_s": number(0, MOST_GRACE_S),
    "ConnectResponse.step_outputs": anything,  # checked by `ResponseCheck._check_step`, which is faster
    "Failed.reason": anything,  # a newer worker may send reasons that this router does not know
    "Failed.message": text(MOST_WORDS),
    "FirstStep.outputs": entries(MAX_CHOICES),
    "FirstStep.pooled": finites(MOST_TOKENS),
    **{f"PrefillTimings.{stage}_ms": number(0, MOST_MS) for stage in ("queue", "total", "fetch", "restore")},
    "PrefillTimings.chunk_ms": numbers(MOST_TOKENS, 0, MOST_MS),
    **{f"Landed.{stage}_ms": number(0, MOST_MS) for stage in ("copy", "exposed", "admission", "first_step")},
    "PromptScores.logprobs": logprobs(MOST_TOKENS),
    "PromptScores.top_logprobs": logprobs(MOST_TOKENS),
    "SequenceOutput.attempt_id": anything,
    "SequenceOutput.choice": number(0, MAX_CHOICES - 1),
    "SequenceOutput.end": anything,
    "SequenceOutput.logprobs": logprobs(MOST_TOKENS),
    "SequenceOutput.top_logprobs": logprobs(MOST_TOKENS),
    "GapCause.cause": anything,
    "WorkerInfo.worker_id": text(MAX_ID_CHARACTERS, IDENTIFIER),
    "WorkerInfo.role": anything,  # unknown roles are refused later, by an error that names both versions
    "WorkerInfo.total_blocks": number(0, MOST_BLOCKS),
    "WorkerInfo.roles": entries(16),
    "WorkerInfo.arithmetic": text(MOST_WORDS),
    "ModelInfo.name": text(MOST_PATH_CHARACTERS),
    "ModelInfo.path": text(MOST_PATH_CHARACTERS),
    "ModelInfo.vocab_size": number(0, MOST_VOCABULARY),
    "KvContent.layout": text(MOST_WORDS),
    "Report.alone_tokens_per_s": number(),
    "Report.beside_tokens_per_s": number(),
    "LinkReport.gb_per_s": number(),
    "LinkReport.fallback": text(MOST_WORDS),
    "TierReport.load_bytes_per_s": number(),
    "CacheSum.digest": anything,
    "CacheEvents.stored": blob(MOST_EVENT_BYTES),
    "CacheEvents.evicted": blob(MOST_EVENT_BYTES),
    "CacheSnapshot.parts": number(0, MOST_SNAPSHOT_PARTS),
    "CacheSnapshot.part": number(0, MOST_SNAPSHOT_PARTS - 1),
    "CacheSnapshot.hashes": blob(MOST_EVENT_BYTES),
    "TierEvents.stored": entries(MOST_WORDS),
    "TierEvents.removed_segments": numbers(MOST_WORDS),
    "TierSnapshot.stored": entries(MOST_WORDS),
    "TierPiece.names": blob(MOST_EVENT_BYTES),
    "HandOver.block_hashes": entries(MOST_SESSION_BLOCKS, size(HASH_BYTES)),
    "KeptSession.id": size(16),
    "KeptSession.owner": size(8),
    "KeptSession.keep_for_s": number(),
}
"""Bounds of all fields except token ids, by message and field name."""
_TOKEN_FIELDS = ("PromptScores.top_token_ids", "SequenceOutput.token_ids", "SequenceOutput.top_token_ids")


_RARE = frozenset(
    session_pb2.StepOutputs.DESCRIPTOR.fields_by_name[name].number for name in ("gaps", "held", "since", "drafts")
)
"""Protobuf numbers of the fields that few messages have. They are checked by the slower rules."""


class ResponseCheck:
    """Checks one worker's messages. Token ids must be in the vocabulary of its model, once the model is known."""

    def __init__(self, vocab_size: int = MOST_VOCABULARY) -> None:
        tokens = numbers(MOST_TOKENS, 0, vocab_size - 1)
        self._bounds = Bounds(_RULES | dict.fromkeys(_TOKEN_FIELDS, tokens))
        self._vocab_size = vocab_size

    def check(self, message: session_pb2.ConnectResponse) -> None:
        """Check all fields of a worker's message. Raises: OutOfBounds."""
        if message.HasField("step_outputs"):  # fast path, for hundreds of messages a second
            numbers_of_message = (message.number, message.acknowledged, message.epoch)
            if max(numbers_of_message) <= MAX_EXACT:
                self._check_step(message.step_outputs)
                return
        self._bounds.check(message)
        for output in message.first_step.outputs:
            _check_logprobs(output)

    def _check_step(self, step: session_pb2.StepOutputs) -> None:
        """Check a step's token ids directly, and all other fields by the rules. Raises: OutOfBounds."""
        vocab_size, bounds = self._vocab_size, self._bounds
        if step.token_ids and max(step.token_ids) >= vocab_size:
            raise OutOfBounds(f"step_outputs.token_ids: {max(step.token_ids)} is not a token id")
        columns = (step.attempt_ids, step.choices, step.offsets, step.token_ids)
        if step.token_ids and not step.made_us:
            raise OutOfBounds("step_outputs: columns without made_us")
        if len(set(map(len, columns))) > 1:
            raise OutOfBounds(f"step_outputs: columns must have equal lengths, not {[*map(len, columns)]}")
        for output in step.outputs:
            token_ids = output.token_ids
            if token_ids and max(token_ids) >= vocab_size:
                raise OutOfBounds(f"step_outputs.token_ids: {max(token_ids)} is not a token id")
            if output.logprobs or output.top_token_ids:
                bounds.check(output)
                _check_logprobs(output)
        for field, value in step.ListFields():
            if field.number in _RARE:
                for each in value:
                    bounds.check(each)


@lru_cache(maxsize=8)
def response_check(vocab_size: int = MOST_VOCABULARY) -> ResponseCheck:
    """Return the check of messages for a model. All links share it: its rules take tens of KiB."""
    return ResponseCheck(vocab_size)


def _check_logprobs(output: session_pb2.SequenceOutput) -> None:
    """Check that there is one log-probability per token, or none. Raises: OutOfBounds."""
    if output.logprobs and len(output.logprobs) != len(output.token_ids):
        raise OutOfBounds(f"logprobs: {len(output.logprobs)} entries for {len(output.token_ids)} tokens")
