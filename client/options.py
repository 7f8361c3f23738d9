"""The options of one request. The server and the model's own defaults decide those that are left out."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `chat` and their collecting forms."""

    max_tokens: int  # per choice, at least 1
    temperature: float  # 0 is greedy
    top_k: int  # 0 keeps all tokens
    top_p: float  # in (0, 1]
    min_p: float  # in [0, 1]
    seed: int
    stop: str | Sequence[str]  # texts that end the answer and are no part of it
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int  # choices, from 1 to 16
    typical_p: float  # in (0, 1]
    repetition_penalty: float  # of tokens in prompt and answer; in (0, 10], 1 is none
    presence_penalty: float  # of tokens in the answer; in [-2, 2]
    frequency_penalty: float  # of tokens in the answer, per occurrence; in [-2, 2]
    logit_bias: Mapping[int, float]  # added to the scores of tokens, by id; each in [-100, 100]
    min_tokens: int  # per choice; nothing stops an answer earlier
    allowed_token_ids: Sequence[int]  # no others are generated
    bad_words: Sequence[str | Sequence[int]]  # never generated; texts, or sequences of token ids
    logprobs: int  # log-probabilities of the tokens, and of so many likeliest in their place; from 0 to 20
    prompt_logprobs: int  # the same of the prompt; it takes nothing from a cache then
    echo: bool  # send the prompt back; with logprobs, those of its tokens too. Not for chat
    best_of: int  # so many choices are made, from n to 16; the n likeliest per token are answered with, at the end
    beam_width: int  # beam search, from n to 16 wide; its n best sequences are the choices, at the end
    length_penalty: float  # of a beam search; above 0 favours long answers
    early_stopping: bool | Literal["never"]  # of a beam search, as in transformers
    json_schema: str | Mapping[str, Any]  # the answer is JSON that meets it; one of these five at most
    json_object: bool  # the answer is a JSON object
    regex: str  # all of the answer matches it
    grammar: str  # the answer matches its rule `start`; Lark, as llguidance reads it
    choice: Sequence[str]  # the answer is one of them
    model: str  # the model's name, or that of one of its adapters; default: the model
    request_id: str  # appears in the server's traces and logs
    priority: int  # lower goes earlier where requests wait for room; from -100 to 100
    cache_salt: str  # prompts share cached blocks only under the same salt
    api_key: str  # of this request, if not the client's own
    timeout_s: float  # for the whole answer, retries included; default: the client's
    traceparent: str  # W3C trace context that the server's spans join
