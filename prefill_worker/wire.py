"""Values of the engine as session messages have them, and back."""

from engine.sampling_params import SamplingParams
from engine.sequence import EndReason
from prefill_worker.loop import PrefillLoad
from protos import session_pb2

END_REASONS = {
    None: session_pb2.END_REASON_UNSPECIFIED,
    EndReason.STOP: session_pb2.END_REASON_STOP,
    EndReason.LENGTH: session_pb2.END_REASON_LENGTH,
}


def sampling_params(sampling: session_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        n=sampling.n,
    )


def page_counts(load: PrefillLoad) -> session_pb2.PageCounts:
    return session_pb2.PageCounts(
        total=load.pages.total,
        free=load.pages.free,
        cached=load.pages.cached,
        held=load.pages.held,
        held_by_sequences=load.held_by_sequences,
        held_by_transfers=load.held_by_transfers,
    )
