"""A client's request: its prompt and sampling as given, checked, and prepared as tokens. Plain values, no protobuf."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from baton.process.security.api_keys import UNLIMITED, KeyLimits
from baton.router.types.events import SequenceEnd
from baton.router.types.session import KeptSession
from baton.router.types.worker import Adapter
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.block_hash import block_hashes
from baton.text.packed_tokens import TokenPacker
from baton.text.pooling import Pooling
from baton.text.sampling import BeamParams, BeamStop, SamplingNumbers
from baton.text.structured.output import StructuredOutput

SESSION_HEADER = "x-session-id"
"""Requests of one session, where the client names one, go to the same workers."""
MAX_SESSION_CHARACTERS = 256


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The session that a call names; empty where it names none."""
    return next((value for name, value in metadata if name == SESSION_HEADER and isinstance(value, str)), "")


class Operation(Enum):
    """Operation by its gen_ai name: an answer, in two ways, or a vector."""

    GENERATE = "text_completion"
    CHAT = "chat"
    EMBED = "embeddings"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Function call that an assistant's message requested; `arguments` is JSON, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of the call that a message of the role `tool` answers
    reasoning: str = ""  # what the assistant thought before it; shown where the template reads it


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat prompt. `tools` are JSON objects in OpenAI's format; `template_options` are names that the model's template
    may read.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that the tokenizer joins, for a model that judges one by the other."""

    query: str
    document: str


Prompt = TextPrompt | TokenPrompt | ChatPrompt
AnyPrompt = Prompt | PairPrompt


class RequestedSpeculation(NamedTuple):
    method: str
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """The client's parameters; None is a field left out. Sequences may be any length: only the validator reads them."""

    max_tokens: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # those given, by their name in `NUMBERS`
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    bad_word_token_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: BeamStop | None = BeamStop.UNPROMISING  # None: a value that is not known
    structured: StructuredOutput | None = None
    speculative: RequestedSpeculation | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request, unchecked."""

    operation: Operation
    prompt: AnyPrompt | None
    request_id: str = ""
    model: str = ""
    sampling: RequestedSampling = RequestedSampling()
    cache_salt: str = ""
    echo: bool = False
    priority: int = 0  # lower goes earlier where requests wait
    session: str = ""  # requests of one session go to the same workers while those are not overloaded; "": none
    session_id: str = ""  # of the conversation whose KV is kept; "": none
    keep_for_s: float | None = None  # after this turn; None: as long as its next turn is expected
    done: bool = False  # the last turn of its conversation
    tenant: str = ""  # the caller, as the transport knows it: waiting tenants share what becomes free; "" is one too
    key_salt: bytes = b""  # of the API key: prompts of others are never found in a cache
    limits: KeyLimits = UNLIMITED  # of the API key
    is_streamed: bool = True  # the client reads the answer as it comes
    shown_tokens: frozenset[str] = frozenset()  # special tokens that are text of the answer: its parts lie between them
    own_form: StructuredOutput | None = None  # that the client asked for, where the answer may be calls too
    pooling: Pooling | None = None  # the prompt is computed for a vector, and there is no answer


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes of the logits of single tokens; the defaults change nothing."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id
    allowed_token_ids: tuple[int, ...] = ()  # empty allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that are never completed


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers):
    """Sampling parameters with every default resolved. `max_tokens` is per choice."""

    max_tokens: int
    seed: int  # 64 bits
    stop_token_ids: tuple[int, ...]  # sorted; the model's own included unless ignored
    n: int  # choices that are made
    rules: LogitRules = LogitRules()
    logprobs: int | None = None  # likeliest tokens to report with each token; None reports no log-probabilities
    prompt_logprobs: int | None = None  # the same of the prompt
    beams: BeamParams | None = None  # its n best sequences are the choices
    structured: StructuredOutput | None = None  # the form of each choice
    most_drafted: int | None = None  # tokens of a choice in one step; None: as the worker is set up

    @property
    def places(self) -> int:
        """Sequences that run at once."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request with everything checked that can be checked before its prompt is tokenised, and every default."""

    operation: Operation
    prompt: AnyPrompt
    request_id: str
    sampling: Sampling
    is_bounded: bool = True
    """Whether the client set max_tokens; if not, `sampling` has the context's size until the prompt is tokenised."""
    stop: tuple[str, ...] = ()
    n: int = 1  # choices of the answer: the best of those that are generated
    cache_salt: str = ""
    bad_words: tuple[str, ...] = ()  # given as texts; `sampling.rules` has those given as tokens
    logprobs: int | None = None  # that the client asked for
    echo: bool = False
    priority: int = 0
    tenant: str = ""
    session: str = ""
    kept_session: KeptSession | None = None
    key_salt: bytes = b""
    pooling: Pooling | None = None
    own_form: StructuredOutput | None = None

    @property
    def streams(self) -> bool:
        """Return whether tokens can be sent as they come: it is known from the beginning which choices are the
        answer.
        """
        return self.sampling.n == self.n and self.sampling.beams is None

    @property
    def prompt_field(self) -> str:
        """Field of the public schema that had the prompt."""
        match self.prompt:
            case TextPrompt() | PairPrompt():
                return "text"
            case TokenPrompt():
                return "token_ids"
            case ChatPrompt():
                return "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest(ValidRequest):
    """A valid request whose prompt is tokenised and hashed: ready for any workers that serve its model."""

    token_ids: tuple[int, ...]
    packed_tokens: bytes  # token_ids as in a message
    cache_root: bytes  # parent of the first block's hash
    block_hashes: tuple[bytes, ...]  # one per complete block of the prompt
    fingerprint: bytes  # of the model that the hashes were computed for; workers must have the same
    block_tokens: int
    echo_text: str = ""  # text of the prompt, if it is part of the answer
    adapter: Adapter | None = None  # covered by the hashes; workers must have it
    answered_tokens: int = 0  # last tokens of token_ids that are the answer's own, released by an earlier attempt
    first_choice: int = 0  # index of the first choice that is generated
    plain_root: bytes = b""  # cache_root without a salt; empty if unknown
    groups: BlockGroups = ONE_GROUP

    @property
    def is_salted(self) -> bool:
        """Return whether the names of its blocks depend on a salt; false if unknown."""
        return self.plain_root not in (b"", self.cache_root)

    def plain_hashes(self, most_blocks: int) -> tuple[bytes, ...]:
        """Return the names of the first blocks without a salt; none if unknown."""
        if not self.plain_root:
            return ()
        if not self.is_salted:
            return self.block_hashes[:most_blocks]
        return block_hashes(self.plain_root, self.token_ids[: most_blocks * self.block_tokens], self.block_tokens)

    @property
    def cacheable(self) -> tuple[bytes, ...]:
        """Blocks that need no computation where they are cached: none if every token's result is wanted."""
        pooling = self.pooling
        needs_all = self.sampling.prompt_logprobs is not None or (pooling is not None and not pooling.reuses_prefix)
        return () if needs_all else self.block_hashes

    @property
    def choices(self) -> range:
        """Indices of the choices that are generated."""
        return range(self.first_choice, self.first_choice + self.sampling.n)


def end_of(sampling: Sampling, answered: tuple[int, ...]) -> SequenceEnd | None:
    """Return how a choice with these tokens has ended; None if it continues.

    An end comes with its token, and may be missing if the tokens come from the client or another router.
    """
    if answered and answered[-1] in sampling.stop_token_ids:
        return SequenceEnd.STOP
    return SequenceEnd.LENGTH if len(answered) >= sampling.max_tokens else None


def replays(
    whole: PreparedRequest, part: PreparedRequest, answers: Mapping[int, tuple[int, ...]]
) -> tuple[PreparedRequest, ...]:
    """The parts that are attempted instead of `part`, which failed.

    Another attempt's prompt is the prompt and the part of the answer that was given out, so that no token is sampled
    twice. Each unfinished choice becomes an attempt of its own: they have different tokens by then. If no token was
    given out, the attempt begins again unchanged; so does a beam search, which gives out nothing before its end.
    `answers` are its unfinished choices, each with its tokens that were given out; `whole` is the original request.
    """
    if whole.sampling.beams is not None or (len(answers) == len(part.choices) and not any(answers.values())):
        return (part,)
    return tuple(replay(whole, choice, answered) for choice, answered in answers.items())


def replay(whole: PreparedRequest, choice: int, answered: tuple[int, ...]) -> PreparedRequest:
    """Return the continuation of one choice. Its hashes cover the answer too: some worker may have those blocks."""
    hashed_tokens = len(whole.block_hashes) * whole.block_tokens
    parent = whole.block_hashes[-1] if whole.block_hashes else whole.cache_root
    further = block_hashes(parent, (*whole.token_ids[hashed_tokens:], *answered), whole.block_tokens)
    return replace(
        whole,
        token_ids=(*whole.token_ids, *answered),
        packed_tokens=whole.packed_tokens + TokenPacker().pack(answered),
        block_hashes=(*whole.block_hashes, *further),
        n=1,
        sampling=replace(whole.sampling, n=1, prompt_logprobs=None),
        answered_tokens=len(answered),
        first_choice=choice,
    )
