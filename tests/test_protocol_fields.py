"""A field that changes an answer needs a protocol: a process that does not know it would answer wrongly."""

import pytest
from google.protobuf.descriptor import Descriptor

from baton.protos import sampling_pb2, session_pb2
from baton.versions import PROTOCOL

SAMPLING = (
    "max_tokens temperature top_k top_p seed stop_token_ids n min_p repetition_penalty presence_penalty "
    "frequency_penalty logit_bias allowed_token_ids bad_words min_tokens logprobs prompt_logprobs typical_p "
    "beam_width length_penalty beam_stop structured most_drafted"
)
COMMAND = (
    "attempt_id transfer_id token_ids sampling block_hashes time_left_ms traceparent adapter answered_tokens "
    "first_choice request_id kept_session"
)
BY_PROTOCOL = {
    1: {
        sampling_pb2.Sampling.DESCRIPTOR: SAMPLING,
        session_pb2.Prefill.DESCRIPTOR: f"{COMMAND} fetch",
        session_pb2.Start.DESCRIPTOR: f"{COMMAND} prefill_endpoint cache_root",
        session_pb2.StepOutputs.DESCRIPTOR: "outputs made_us held_us gaps held since drafts",
    },
    2: {  # adapters that come and go, vectors; objectives and sizes of messages, which change no answer
        session_pb2.Prefill.DESCRIPTOR: "adapter_digest pooling first_token_in_ms ttft_slo_ms tbt_slo_ms",
        session_pb2.Start.DESCRIPTOR: "adapter_digest pooling first_token_in_ms ttft_slo_ms tbt_slo_ms tokens_together",
        session_pb2.StepOutputs.DESCRIPTOR: "attempt_ids choices offsets token_ids",
    },
}
"""The fields that each protocol brought. One that changes no answer counts with the newest."""


@pytest.mark.parametrize("message", BY_PROTOCOL[1], ids=lambda message: message.name)
def test_fields_that_change_an_answer_have_a_protocol(message: Descriptor) -> None:
    known = {name for fields in BY_PROTOCOL.values() for name in fields.get(message, "").split()}
    assert {field.name for field in message.fields} == known, "docs/releases.md: when is PROTOCOL raised?"


def test_newest_protocol_is_announced() -> None:
    assert max(BY_PROTOCOL) == PROTOCOL
