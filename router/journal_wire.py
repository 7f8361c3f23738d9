"""Records of the journal between bytes and plain values. Fields that a record leaves out follow from the others."""

from google.protobuf.message import DecodeError

from protos import journal_pb2, sampling_pb2
from router import session_wire
from router.block_hashing import HASH_BYTES, block_hashes
from router.journal import Place, Record
from router.request import (
    BeamSearch,
    BeamStop,
    LogitRules,
    Operation,
    PreparedRequest,
    Sampling,
    TokenPrompt,
    ValidRequest,
)
from router.worker import Adapter
from structured.output import StructuredKind, StructuredOutput

VERSION = 1
_BEAM_STOPS = {number: stop for stop, number in session_wire.BEAM_STOPS.items()}
_KINDS: dict[int, StructuredKind] = {number: kind for kind, number in session_wire.STRUCTURED_KINDS.items()}


def to_bytes(record: Record) -> bytes:
    """Holds no API key, and nothing of the answer."""
    request, valid = record.request, record.request.valid
    return journal_pb2.JournalRecord(
        version=VERSION,
        router_id=record.router_id,
        places=[
            journal_pb2.JournalPlace(
                endpoint=place.endpoint,
                attempt_id=place.attempt_id,
                first_choice=place.first_choice,
                choices=place.choices,
                answered_tokens=place.answered_tokens,
            )
            for place in record.places
        ],
        request_id=valid.request_id,
        operation=valid.operation.value,
        model=record.model,
        fingerprint=request.fingerprint,
        adapter_digest=request.adapter.digest if request.adapter is not None else "",
        token_ids=request.token_ids,
        sampling=session_wire.sampling_message(request.sampling, computes_prompt=True),
        cache_root=request.cache_root,
        stop=valid.stop,
        n=valid.n,
        tells_logprobs=valid.logprobs is not None,
        echo=valid.echo,
        echo_text=request.echo_text,
        priority=valid.priority,
        session=valid.session,
        stream=record.stream,
    ).SerializeToString()


def from_bytes(data: bytes, tenant: str, block_tokens: int) -> Record | None:
    """For the caller `tenant`, whose record it is; None for one that this version does not understand."""
    try:
        record = journal_pb2.JournalRecord.FromString(data)
        if record.version != VERSION or len(record.cache_root) != HASH_BYTES:
            return None
        request = _request(record, tenant, block_tokens)
    except (DecodeError, KeyError, ValueError):
        return None
    places = tuple(
        Place(place.endpoint, place.attempt_id, place.first_choice, place.choices, place.answered_tokens)
        for place in record.places
    )
    return Record(record.router_id, record.stream, request, record.model, places)


def _request(record: journal_pb2.JournalRecord, tenant: str, block_tokens: int) -> PreparedRequest:
    sampling, token_ids = _sampling(record.sampling), tuple(record.token_ids)
    return PreparedRequest(
        valid=_valid(record, sampling, tenant),
        token_ids=token_ids,
        cache_root=record.cache_root,
        block_hashes=block_hashes(record.cache_root, token_ids, block_tokens),
        sampling=sampling,
        fingerprint=record.fingerprint,
        block_tokens=block_tokens,
        echo_text=record.echo_text,
        adapter=Adapter(record.model, record.adapter_digest) if record.adapter_digest else None,
    )


def _valid(record: journal_pb2.JournalRecord, sampling: Sampling, tenant: str) -> ValidRequest:
    return ValidRequest(
        operation=Operation(record.operation),
        prompt=TokenPrompt(tuple(record.token_ids)),
        request_id=record.request_id,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=tuple(record.stop),
        stop_token_ids=sampling.stop_token_ids,
        n=record.n,
        cache_salt="",  # it is in the root of the hashes
        typical_p=sampling.typical_p,
        rules=sampling.rules,
        logprobs=sampling.logprobs if record.tells_logprobs else None,
        prompt_logprobs=sampling.prompt_logprobs,
        best_of=sampling.n,
        beams=sampling.beams,
        structured=sampling.structured,
        echo=record.echo,
        priority=record.priority,
        tenant=tenant,
        session=record.session,
    )


def _sampling(message: sampling_pb2.Sampling) -> Sampling:
    """The inverse of session_wire's. Raises: KeyError for a name that is not known."""
    form = message.structured
    return Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        n=message.n,
        typical_p=message.typical_p,
        rules=LogitRules(
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            min_tokens=message.min_tokens,
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        ),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        beams=_beams(message),
        structured=StructuredOutput(_KINDS[form.kind], form.text) if message.HasField("structured") else None,
    )


def _beams(message: sampling_pb2.Sampling) -> BeamSearch | None:
    if not message.beam_width:
        return None
    stop: BeamStop = _BEAM_STOPS[message.beam_stop]
    return BeamSearch(message.beam_width, message.length_penalty, stop)
