"""A client's request, as received, validated, and prepared as tokens. Plain values, no protobuf."""

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
"""Header with the session of a request, whose requests go to the same workers."""
MAX_SESSION_CHARACTERS = 256


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the session in the metadata of a call; empty without one."""
    return next((value for name, value in metadata if name == SESSION_HEADER and isinstance(value, str)), "")


class Operation(Enum):
    """Operation by its gen_ai name."""

    GENERATE = "text_completion"
    CHAT = "chat"
    EMBED = "embeddings"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Function call in an assistant's message. `arguments`: JSON as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a chat."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # id of the call that a message of the role `tool` answers
    reasoning: str = ""  # reasoning before the message, for templates that read it


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat prompt. `tools`: JSON objects in OpenAI's format; `template_options`: variables for the chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that the tokenizer joins, for a reranker."""

    query: str
    document: str


Prompt = TextPrompt | TokenPrompt | ChatPrompt
AnyPrompt = Prompt | PairPrompt


class RequestedSpeculation(NamedTuple):
    method: str
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling parameters as received; None: absent. Sequences have any length, so only the validator reads them."""

    max_tokens: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # given numbers, by their name in `NUMBERS`
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
    early_stopping: BeamStop | None = BeamStop.UNPROMISING  # None: an unknown value
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
    priority: int = 0  # lower is earlier among pending requests
    session: str = ""  # session whose requests prefer the same workers; empty: none
    session_id: str = ""  # session whose KV is kept; empty: none
    keep_for_s: float | None = None  # retention of KV after this turn; None: until the next turn is overdue
    done: bool = False  # last turn of the session
    tenant: str = ""  # caller, for fair shares of the queue; empty is a tenant, too
    key_salt: bytes = b""  # salt of the API key, which separates cached prompts of different keys
    limits: KeyLimits = UNLIMITED  # limits of the API key
    is_streamed: bool = True
    shown_tokens: frozenset[str] = frozenset()  # special tokens kept in the text, by which its parts are recognised
    own_form: StructuredOutput | None = None  # form that the client requested, if the answer may be calls instead
    pooling: Pooling | None = None  # pooling of a request for a vector; None: for an answer


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes of the logits of single tokens. The defaults change nothing."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id
    allowed_token_ids: tuple[int, ...] = ()  # empty allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden sequences of token ids


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers):
    """Sampling parameters with every default resolved. `max_tokens` applies to each choice."""

    max_tokens: int
    seed: int  # 64 bits
    stop_token_ids: tuple[int, ...]  # sorted; includes the model's end-of-sequence tokens unless ignored
    n: int  # generated choices
    rules: LogitRules = LogitRules()
    logprobs: int | None = None  # reported alternatives per token; None: no log-probabilities
    prompt_logprobs: int | None = None  # reported alternatives per prompt token; None: no log-probabilities
    beams: BeamParams | None = None  # beam search, whose n best sequences are the choices
    structured: StructuredOutput | None = None  # form of each choice
    most_drafted: int | None = None  # maximum drafted tokens per step and choice; None: the worker's setting

    @property
    def places(self) -> int:
        """Number of batch slots that the request needs."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """Request with all defaults, validated as far as possible before tokenisation."""

    operation: Operation
    prompt: AnyPrompt
    request_id: str
    sampling: Sampling
    is_bounded: bool = True
    """True if the client set max_tokens; if not, `sampling` has the context's size until the prompt is tokenised."""
    stop: tuple[str, ...] = ()
    n: int = 1  # choices of the answer: the best of the generated ones
    cache_salt: str = ""
    bad_words: tuple[str, ...] = ()  # bad words given as texts; `sampling.rules` has those given as tokens
    logprobs: int | None = None  # alternatives that the client requested
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
        """Return whether tokens can be sent on arrival: all generated choices belong to the answer."""
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
    """Validated request whose prompt is tokenised and hashed, ready for the workers of its model."""

    token_ids: tuple[int, ...]
    packed_tokens: bytes  # token_ids in protobuf's packed encoding
    cache_root: bytes  # parent of the first block's hash
    block_hashes: tuple[bytes, ...]  # one per complete block of the prompt
    fingerprint: bytes  # fingerprint of the model, which the workers must have
    block_tokens: int
    echo_text: str = ""  # text of the prompt, if it is part of the answer
    adapter: Adapter | None = None  # adapter, which the hashes cover and the workers must have
    answered_tokens: int = 0  # last tokens of token_ids that belong to the answer, released by an earlier attempt
    first_choice: int = 0  # index of the first generated choice
    plain_root: bytes = b""  # cache_root without a salt; empty if unknown
    groups: BlockGroups = ONE_GROUP

    @property
    def is_salted(self) -> bool:
        """Return whether the block hashes depend on a salt; false if unknown."""
        return self.plain_root not in (b"", self.cache_root)

    def plain_hashes(self, most_blocks: int) -> tuple[bytes, ...]:
        """Return the hashes of the first blocks without a salt; none if unknown."""
        if not self.plain_root:
            return ()
        if not self.is_salted:
            return self.block_hashes[:most_blocks]
        return block_hashes(self.plain_root, self.token_ids[: most_blocks * self.block_tokens], self.block_tokens)

    @property
    def cacheable(self) -> tuple[bytes, ...]:
        """Blocks that need no computation if they are cached: none if every token's result is needed."""
        pooling = self.pooling
        needs_all = self.sampling.prompt_logprobs is not None or (pooling is not None and not pooling.reuses_prefix)
        return () if needs_all else self.block_hashes

    @property
    def choices(self) -> range:
        """Indices of the generated choices."""
        return range(self.first_choice, self.first_choice + self.sampling.n)


def end_of(sampling: Sampling, answered: tuple[int, ...]) -> SequenceEnd | None:
    """Return how a choice with these tokens ended; None if it continues.

    The end is derived because tokens from the client or another router come without it.
    """
    if answered and answered[-1] in sampling.stop_token_ids:
        return SequenceEnd.STOP
    return SequenceEnd.LENGTH if len(answered) >= sampling.max_tokens else None


def replays(
    whole: PreparedRequest, part: PreparedRequest, answers: Mapping[int, tuple[int, ...]]
) -> tuple[PreparedRequest, ...]:
    """Return the parts to attempt instead of the failed `part`.

    A new attempt's prompt includes the released tokens of the answer, so that no token is sampled twice. Each
    unfinished choice becomes an attempt of its own, since their tokens differ. Without released tokens, and for a beam
    search, the part is attempted again unchanged. `answers`: released tokens of its unfinished choices; `whole`:
    original request.
    """
    if whole.sampling.beams is not None or (len(answers) == len(part.choices) and not any(answers.values())):
        return (part,)
    return tuple(replay(whole, choice, answered) for choice, answered in answers.items())


def replay(whole: PreparedRequest, choice: int, answered: tuple[int, ...]) -> PreparedRequest:
    """Return the continuation of one choice. Its hashes cover the answer, whose blocks may be cached."""
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
