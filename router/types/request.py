"""A client's request in three stages: as received, validated, and prepared as tokens. Plain values without protobuf."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from baton.process.objectives import NO_LATENCY_OBJECTIVES, NONE_REQUESTED, LatencyObjectives, RequestedObjectives
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
"""Header that names a request's session; requests of one session prefer the same workers."""
MAX_SESSION_CHARACTERS = 256
TOGETHER = 64
"""Number of tokens that a worker sends together to a client that reads a complete answer. If the worker dies, at most
this number is computed again.
"""
TOGETHER_BEFORE_STOPS = 8
"""The same for an answer with stop strings: routers find a stop string, and tokens after it are computed in vain."""


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the session named in a call's metadata; empty if none is named."""
    return next((value for name, value in metadata if name == SESSION_HEADER and isinstance(value, str)), "")


class Operation(Enum):
    """Operation of a request. Values are OpenTelemetry's names (gen_ai.operation.name)."""

    GENERATE = "text_completion"
    CHAT = "chat"
    EMBED = "embeddings"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Function call in an assistant's message. `arguments`: JSON text as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat prompt."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # in a message of the role `tool`: id of the call that it answers
    reasoning: str = ""  # the model's reasoning before the message, for templates that show it


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Input of the chat template. `tools`: JSON objects in OpenAI's format; `template_options`: its variables."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    add_generation_prompt: bool = True
    continues: bool = False  # the prompt ends with the last message's text, which the answer continues


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Query and document for a reranker. The tokenizer joins the two texts."""

    query: str
    document: str


Prompt = TextPrompt | TokenPrompt | ChatPrompt
AnyPrompt = Prompt | PairPrompt


class RequestedSpeculation(NamedTuple):
    method: str
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling parameters as received; None: not set. Only the validator reads sequences, which may have any length."""

    max_tokens: int | None = None
    is_clamped: bool = False  # True: max_tokens may exceed the rest of the context, which then takes its place
    numbers: Mapping[str, float] = field(default_factory=dict)  # numbers that the client set, by name in `NUMBERS`
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
    early_stopping: BeamStop | None = BeamStop.UNPROMISING  # None: the client sent an unknown value
    structured: StructuredOutput | None = None
    speculative: RequestedSpeculation | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request of a client, not validated yet."""

    operation: Operation
    prompt: AnyPrompt | None
    request_id: str = ""
    model: str = ""
    sampling: RequestedSampling = RequestedSampling()
    cache_salt: str = ""
    echo: bool = False
    priority: int = 0  # pending requests with a lower value are served earlier
    objectives: RequestedObjectives = NONE_REQUESTED
    session: str = ""  # name of a session whose requests prefer the same workers; empty: none
    session_id: str = ""  # name of a session whose KV is kept between requests; empty: none
    keep_for_s: float | None = None  # time for which KV is kept after this turn; None: until the next turn is overdue
    done: bool = False  # True: this is the last turn of the session
    tenant: str = ""  # caller; the queue is fair between tenants, and the empty name is also a tenant
    key_salt: bytes = b""  # salt of the API key: prompts of different keys share no cached blocks
    limits: KeyLimits = UNLIMITED  # limits of the API key
    is_streamed: bool = True
    shown_tokens: frozenset[str] = frozenset()  # special tokens kept in the text for output parsers
    own_form: StructuredOutput | None = None  # the client's schema or grammar, if the answer may be calls instead
    pooling: Pooling | None = None  # how to compute a vector; None: the request asks for an answer


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rules that change the logits of tokens before sampling. The defaults change nothing."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # number to add, by token id
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens are allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that must not be generated


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers):
    """Validated sampling parameters with all defaults filled in. `max_tokens` applies to each choice."""

    max_tokens: int
    seed: int  # 64 bits
    stop_token_ids: tuple[int, ...]  # sorted; with the model's end-of-sequence tokens unless the client ignores them
    n: int  # number of generated choices
    rules: LogitRules = LogitRules()
    logprobs: int | None = None  # number of reported alternatives per token; None: no log-probabilities
    prompt_logprobs: int | None = None  # number of reported alternatives per prompt token; None: no log-probabilities
    beams: BeamParams | None = None  # beam search, of which the n best sequences are the choices
    structured: StructuredOutput | None = None  # schema or grammar that each choice must match
    most_drafted: int | None = None  # maximum drafted tokens per step and choice; None: the worker's setting

    @property
    def places(self) -> int:
        """Number of batch slots that the request needs."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """Request with all defaults filled in, validated as far as possible before the prompt is tokenised."""

    operation: Operation
    prompt: AnyPrompt
    request_id: str
    sampling: Sampling
    is_bounded: bool = True
    """True if max_tokens must fit into the context. If not, it is an upper bound until the prompt is tokenised."""
    stop: tuple[str, ...] = ()
    n: int = 1  # number of choices in the answer: the best of `sampling.n` generated choices
    cache_salt: str = ""
    bad_words: tuple[str, ...] = ()  # bad words given as text; `sampling.rules` has those given as token ids
    logprobs: int | None = None  # alternatives per token that the client asked for; None: no log-probabilities
    echo: bool = False
    priority: int = 0
    tenant: str = ""
    session: str = ""
    kept_session: KeptSession | None = None
    key_salt: bytes = b""
    pooling: Pooling | None = None
    own_form: StructuredOutput | None = None
    objectives: LatencyObjectives = NO_LATENCY_OBJECTIVES
    is_streamed: bool = True  # False: the client reads a complete answer

    @property
    def tokens_together(self) -> int:
        """Return the number of tokens of a choice that a worker may send together."""
        if self.is_streamed and self.streams:
            return 1
        return TOGETHER_BEFORE_STOPS if self.stop else TOGETHER

    @property
    def streams(self) -> bool:
        """Return whether tokens can be sent as they arrive. A best-of answer or beam search must be complete first."""
        return self.sampling.n == self.n and self.sampling.beams is None

    @property
    def prompt_field(self) -> str:
        """Name of the prompt's field in the public schema."""
        match self.prompt:
            case TextPrompt() | PairPrompt():
                return "text"
            case TokenPrompt():
                return "token_ids"
            case ChatPrompt():
                return "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest(ValidRequest):
    """Validated request whose prompt is tokenised and hashed, ready to be sent to workers."""

    token_ids: tuple[int, ...]
    packed_tokens: bytes  # token_ids in protobuf's packed encoding
    cache_root: bytes  # parent hash of the first block
    block_hashes: tuple[bytes, ...]  # one hash per complete block of the prompt
    fingerprint: bytes  # fingerprint of the model that the workers must have
    block_tokens: int
    echo_text: str = ""  # text of the prompt, if it is echoed in the answer
    adapter: Adapter | None = None  # adapter that the workers must have; part of the block hashes
    answered_tokens: int = 0  # number of tokens at the end of token_ids that earlier attempts generated
    first_choice: int = 0  # index of the first generated choice
    plain_root: bytes = b""  # what cache_root would be without a salt; empty: unknown
    groups: BlockGroups = ONE_GROUP

    @property
    def is_salted(self) -> bool:
        """Return whether the block hashes depend on a salt. False if this is unknown."""
        return self.plain_root not in (b"", self.cache_root)

    def plain_hashes(self, most_blocks: int) -> tuple[bytes, ...]:
        """Return the hashes that the first blocks would have without a salt; empty if unknown."""
        if not self.plain_root:
            return ()
        if not self.is_salted:
            return self.block_hashes[:most_blocks]
        return block_hashes(self.plain_root, self.token_ids[: most_blocks * self.block_tokens], self.block_tokens)

    @property
    def cacheable(self) -> tuple[bytes, ...]:
        """Hashes of blocks that need not be computed if they are cached. Empty if every token's result is needed."""
        pooling = self.pooling
        needs_all = self.sampling.prompt_logprobs is not None or (pooling is not None and not pooling.reuses_prefix)
        return () if needs_all else self.block_hashes

    @property
    def choices(self) -> range:
        """Indices of the generated choices within the original request."""
        return range(self.first_choice, self.first_choice + self.sampling.n)


def end_of(sampling: Sampling, answered: tuple[int, ...]) -> SequenceEnd | None:
    """Return how a choice with the tokens `answered` ended; None if it continues.

    The end is derived from the tokens, because a client or another router sends tokens without their end.
    """
    if answered and answered[-1] in sampling.stop_token_ids:
        return SequenceEnd.STOP
    return SequenceEnd.LENGTH if len(answered) >= sampling.max_tokens else None


def replays(
    whole: PreparedRequest, part: PreparedRequest, answers: Mapping[int, tuple[int, ...]]
) -> tuple[PreparedRequest, ...]:
    """Return the requests to attempt in place of the failed `part`.

    A new attempt's prompt includes the released tokens of the answer, so that no token is sampled twice. Choices have
    different tokens, so each unfinished choice is attempted separately. Without released tokens, and for a beam
    search, `part` is attempted again unchanged. `answers`: released tokens of the unfinished choices of `part`;
    `whole`: original request.
    """
    if whole.sampling.beams is not None or (len(answers) == len(part.choices) and not any(answers.values())):
        return (part,)
    return tuple(replay(whole, choice, answered) for choice, answered in answers.items())


def replay(whole: PreparedRequest, choice: int, answered: tuple[int, ...]) -> PreparedRequest:
    """Return a request that continues one choice after the tokens `answered`, which become part of the prompt."""
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
