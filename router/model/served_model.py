"""Served model: its description, tokenizer and adapters, and the preparation of requests for placement.

The tokenizer runs on a thread, so that the event loop never computes.
"""

import asyncio
import dataclasses
import json
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

from tokenizers import Encoding, Tokenizer

from baton.process.errors import InvalidArgument, NotFound, Unavailable
from baton.process.registry.worker_record import WEIGHTS, WorkerRole, version_of, weights_digest
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.model.chat_template import ChatTemplate, UnreadOption, chat_template_of, up_to_text
from baton.router.model.defaults import GenerationDefaults, ModelFolderError, read_family, read_generation_defaults
from baton.router.model.form_checker import FormChecker
from baton.router.model.form_process import Setup
from baton.router.model.generic_tools import with_described_tools
from baton.router.model.marks import find_marks
from baton.router.model.prompt_reader import (
    LONG_BYTES,
    LongPart,
    PromptReader,
    Reading,
    ReadPrompt,
    TextTooLong,
    encode,
)
from baton.router.model.template_process import TemplateRefused
from baton.router.model.template_traces import NotShown
from baton.router.model.turns import Turns
from baton.router.model.validation import (
    MAX_TEXT_BYTES,
    PIECE_TOKENS,
    TOKEN_IDS,
    check_chat,
    check_long_prompt,
    check_something_is_left,
    check_text,
    fit_to_context,
    prompt_too_long,
    sampling_fields,
)
from baton.router.placement.cluster import Worker
from baton.router.types.request import (
    AnyPrompt,
    ChatPrompt,
    PairPrompt,
    PreparedRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ValidRequest,
)
from baton.router.types.worker import Adapter, WorkerDescription
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.block_hash import block_hashes, root_hash
from baton.text.detokenizer import Detokenizer, decode, joins_bytes, silent_token_ids, special_token_ids
from baton.text.host.files import reads
from baton.text.pooler_files import ModelKind, Pooler, PoolingRefused, read_pooler
from baton.text.pooling import Pooling, second_text
from baton.text.sampling import bad_word_tokens
from baton.text.structured.thoughts import form_of
from baton.text.tokenizer.checkpoint_tokenizer import CheckpointTokenizer, read_tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


class TokenBytes:
    """Exact bytes of each token, including tokens that contain only some bytes of a character.

    Decoding a single token would turn an incomplete character into U+FFFD and may drop a leading space. Results are
    cached.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        # Only the decoder is serialised: `Tokenizer.to_str()` would serialise the complete vocabulary.
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._letters = _byte_letters() if _mentions(decoder, "ByteLevel") else None
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that only pads the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._letters is not None:
            letters = self._letters
            return b"".join(bytes((letters[letter],)) if letter in letters else letter.encode() for letter in token)
        match = _BYTE_FALLBACK.fullmatch(token)
        return bytes((int(match[1], 16),)) if match else token.replace(_SPACE, " ").encode()


def _mentions(decoder: object, kind: str) -> bool:
    """Return whether the decoder's serialised state, or a step in it, has the type `kind`."""
    if isinstance(decoder, Mapping):
        return decoder.get("type") == kind or any(_mentions(step, kind) for step in decoder.get("decoders", ()))
    return False


def _byte_letters() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies: the inverse of GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


MAX_NAME_CHARACTERS = 64  # maximum length of an option's name in an error
MOST_RENDERED_CHARACTERS = 4 * MAX_TEXT_BYTES  # limit of a rendered prompt; that of its messages is MAX_TEXT_BYTES
LONG_THREADS = 2
LONG_NICENESS = 10  # niceness of threads for long texts: streams have priority


class TokenizerWorker:
    """Tokenizer on a thread of its own, on which callers take turns. Long texts are tokenised on other threads.

    `tenant`: name of the caller, for fair turns; empty: each call counts as another caller.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        known_bytes: int = 0,
        source: CheckpointTokenizer | None = None,
    ) -> None:
        """Create the tokenizer's threads. `known_bytes`: memory for the cache of prompt prefixes.

        `source`: facts of the checkpoint's tokenizer; None: those of a tokenizer.json alone.
        """
        self._tokenizer = tokenizer
        self.source = source
        self.size = tokenizer.get_vocab_size()
        self._cleans_spaces = source is not None and source.cleans_spaces
        self._silent = silent_token_ids(tokenizer)
        self._alone: dict[int, str] = {}  # texts of single tokens, without special tokens
        self._joins = joins_bytes(tokenizer)
        self._special = special_token_ids(tokenizer)
        self._silent_bytes = silent_token_ids(tokenizer, skip_special_tokens=False)
        self.chat_template = chat_template
        self.token_bytes = TokenBytes(tokenizer)
        self.added_tokens = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        self.reader = PromptReader(tokenizer, find_marks(tokenizer, chat_template), known_bytes)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._turns = Turns(1)
        self._long_threads = ThreadPoolExecutor(LONG_THREADS, "long texts", _be_nice)
        self._long_turns = Turns(LONG_THREADS)

    async def encode(
        self, text: str, add_special_tokens: bool, most_tokens: int | None = None, tenant: str = ""
    ) -> tuple[int, ...]:
        """Encode a text. Raises: TextTooLong for more than `most_tokens`, without encoding all of a far longer text."""
        return (await self._read(self.reader.tokens(text, add_special_tokens, most_tokens), tenant)).token_ids

    async def encode_pair(
        self, pair: PairPrompt, most_tokens: int | None, tenant: str = ""
    ) -> tuple[tuple[int, ...], int | None]:
        """Encode a pair of texts by the tokenizer's own template, cut as by sentence-transformers. Raises: TextTooLong.

        Return the token ids and the position of the second text's first token, as `second_text` does.
        """
        name = self._turns.name(tenant)
        if most_tokens is not None and (self.source is None or self.source.max_pair_tokens is None):
            for text in (pair.query, pair.document):
                counting = self.reader.count(text, most_tokens)
                while await self._on_thread(name, _has_next, counting):
                    pass
        size = len(pair.query) + len(pair.document)
        if size <= LONG_BYTES // 4:
            return await self._on_thread(name, self._encode_pair, pair, most_tokens)
        return await self._on_long_thread(name, size, self._encode_pair, pair, most_tokens)

    async def cut(self, prompt: Prompt, tenant: str = "") -> Prompt:
        """Return a prompt to embed: a text is tokenised and cut if sentence-transformers cuts this model's texts."""
        source = self.source
        if not isinstance(prompt, TextPrompt) or source is None or source.max_text_tokens is None:
            return prompt
        name, size = self._turns.name(tenant), len(prompt.text)
        if size <= LONG_BYTES // 4:
            return TokenPrompt(await self._on_thread(name, source.cut, self._tokenizer, prompt.text))
        return TokenPrompt(await self._on_long_thread(name, size, source.cut, self._tokenizer, prompt.text))

    async def decode(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        return await self._on_thread("", decode, self._tokenizer, token_ids, skip_special_tokens, self._cleans_spaces)

    async def prompt_tokens(
        self, prompt: AnyPrompt, most_tokens: int | None = None, vocab_size: int | None = None, tenant: str = ""
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt. `vocab_size`: bound for checking a long prompt of ids; None: no check.

        Raises: InvalidArgument for messages that the template rejects and for invalid token ids, TextTooLong.
        """
        if isinstance(prompt, PairPrompt):
            return (await self.encode_pair(prompt, most_tokens, tenant))[0]
        if not isinstance(prompt, TokenPrompt):
            return await self.encode(*await self._text(prompt, tenant), most_tokens, tenant)
        if vocab_size is None or len(prompt.token_ids) <= PIECE_TOKENS:
            return tuple(prompt.token_ids)
        return await self.checked(TOKEN_IDS, prompt.token_ids, vocab_size)

    async def read(
        self, prompt: Prompt, root: bytes, block_tokens: int, most_tokens: int, vocab_size: int, tenant: str = ""
    ) -> ReadPrompt:
        """Return tokens and block hashes of a prompt. Cached prefixes with the same `root` are reused.

        Raises: InvalidArgument, TextTooLong, Unavailable.
        """
        if isinstance(prompt, TokenPrompt):
            token_ids = await self.prompt_tokens(prompt, most_tokens, vocab_size)
            names = await self._on_thread(tenant, block_hashes, root, token_ids, block_tokens)
            return ReadPrompt(token_ids, names, await self._on_thread(tenant, self.reader.packer.pack, token_ids))
        text, add_special_tokens = await self._text(prompt, tenant)
        return await self._read(self.reader.read(text, add_special_tokens, root, block_tokens, most_tokens), tenant)

    async def checked(self, field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """Check any number of token ids on the tokenizer's thread. Raises: InvalidArgument naming the first bad one."""
        return await self._on_thread("", check_long_prompt, field, token_ids, vocab_size)

    async def bad_words(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of forbidden texts: of each text as it is, and of each after a space.

        Raises: InvalidArgument for a text without tokens.
        """
        if not texts:
            return ()
        return await self._on_thread("", self._words, texts)

    def detokenizer(self, shown: Set[str] = frozenset()) -> Detokenizer:
        """Create a detokenizer. `shown`: special tokens that it keeps in the text."""
        if shown.isdisjoint(self._special):
            cleans, alone, joins = self._cleans_spaces, self._alone, self._joins
            return Detokenizer(self._tokenizer, self._silent, cleans_spaces=cleans, alone=alone, joins=joins)
        left_out = frozenset(token_id for text, token_id in self._special.items() if text not in shown)
        return Detokenizer(self._tokenizer, self._silent_bytes, False, left_out, self._cleans_spaces)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._long_threads.shutdown(wait=False, cancel_futures=True)
        if self.chat_template is not None:
            self.chat_template.close()

    def _encode_pair(self, pair: PairPrompt, most_tokens: int | None) -> tuple[tuple[int, ...], int | None]:
        """Encode a pair of texts on the calling thread. Raises: TextTooLong."""
        texts, source = (pair.query, pair.document), self.source
        encoding = self._tokenizer.encode(*texts) if source is None else source.pair(self._tokenizer, *texts)
        if most_tokens is not None and len(encoding) > most_tokens:
            raise TextTooLong(len(encoding), counted=True)
        return tuple(encoding.ids), second_text(encoding.type_ids)

    @sampling_fields()
    def _words(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return bad_word_tokens(texts, lambda each: encode(self._tokenizer, each, False).ids)

    async def _text(self, prompt: TextPrompt | ChatPrompt, tenant: str) -> tuple[str, bool]:
        """Return a prompt's text, and whether the tokenizer must add special tokens: a rendered chat contains them.

        Raises: InvalidArgument, Unavailable.
        """
        if isinstance(prompt, TextPrompt):
            return prompt.text, True
        return await self._render(prompt, tenant), False

    async def _render(self, prompt: ChatPrompt, tenant: str) -> str:
        """Render a chat with the model's template. Raises: InvalidArgument, Unavailable."""
        if self.chat_template is None:
            raise InvalidArgument("messages", "this model has no chat template; use Generate")
        if prompt.tools and not self.chat_template.shows_tools:
            prompt = with_described_tools(prompt)
        try:
            rendered = await self.chat_template.render(
                await self.chat_template.shown(prompt.messages, tenant, has_tools=bool(prompt.tools)),
                prompt.tools,
                prompt.template_options,
                prompt.add_generation_prompt,
                MOST_RENDERED_CHARACTERS,
                tenant,
            )
            return up_to_text(rendered, prompt.messages[-1].content) if prompt.continues else rendered
        except NotShown as lost:
            raise InvalidArgument(lost.field, str(lost)) from lost
        except UnreadOption as unread:
            message = "the model's chat template does not read this option"
            raise InvalidArgument(f"template_options.{unread.name[:MAX_NAME_CHARACTERS]}", message) from unread
        except TemplateRefused as refusal:
            raise InvalidArgument("messages", f"the model's chat template rejects them: {refusal}") from refusal

    async def _read(self, reading: Reading, tenant: str) -> ReadPrompt:
        """Run a prompt's reading steps on the threads, in fair turns with other prompts. Raises: TextTooLong."""
        name, encoding = self._turns.name(tenant), None
        while not isinstance(step := await self._on_thread(name, _go_on, reading, encoding), ReadPrompt):
            encoding = None
            if step is not None:
                long = (self._tokenizer, step.text, step.add_special_tokens)
                encoding = await self._on_long_thread(name, step.size_bytes, encode, *long)
        return step

    async def _on_thread(self, tenant: str, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        async with self._turns.turn(tenant, 1):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _on_long_thread(
        self, tenant: str, cost: int, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        async with self._long_turns.turn(tenant, cost):
            return await asyncio.get_running_loop().run_in_executor(self._long_threads, work, *arguments)


def _be_nice() -> None:
    """Lower the priority of the calling thread. Only on Linux: elsewhere it would affect the complete process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LONG_NICENESS)


def _has_next(counting: Generator[None, object]) -> bool:
    """Perform one step of counting, and return whether another step follows. Raises: TextTooLong."""
    return next(counting, _END) is None


_END = object()


def _go_on(reading: Reading, encoding: Encoding | None) -> ReadPrompt | LongPart | None:
    """Perform the next step of reading. After the last step, free the generator's memory on this thread."""
    step = reading.send(encoding)
    if isinstance(step, ReadPrompt):
        reading.close()
    return step


@reads(ModelFolderError)
def load_tokenizer(folder: Path, known_bytes: int = 0, tool_format: str = "") -> TokenizerWorker:
    """Read the tokenizer and chat template of the checkpoint in `folder`. Raises: ModelFolderError.

    `known_bytes`: memory for the cache of prompt prefixes. `tool_format`: format of tool calls; empty: it is detected.
    """
    found = read_tokenizer(folder)
    template = chat_template_of(found, tool_format)
    return TokenizerWorker(found.tokenizer(), template, known_bytes, found)


def served_adapters(
    workers: Sequence[Worker], fingerprint: bytes, needed: Set[WorkerRole], listed: Set[Adapter] = frozenset()
) -> tuple[Adapter, ...]:
    """Return the adapters that requests can choose, sorted by name: at least one worker of every needed role has them.

    They were loaded at runtime (`listed`) or at a worker's start. If workers have different adapters of the same name,
    as during a replacement, the one on most workers is returned.
    """
    holders: dict[Adapter, list[WorkerRole]] = {}
    for worker in workers:
        if worker.held and worker.description is not None and worker.description.fingerprint == fingerprint:
            for adapter in worker.description.adapters:
                if adapter.name != WEIGHTS and (adapter in listed or adapter in worker.description.started_adapters):
                    holders.setdefault(adapter, []).append(worker.role)
    by_name: dict[str, Adapter] = {}
    whole = [adapter for adapter, roles in holders.items() if needed <= set(roles)]
    for adapter in sorted(whole, key=lambda adapter: (len(holders[adapter]), adapter.digest)):
        by_name[adapter.name] = adapter
    return tuple(by_name[name] for name in sorted(by_name))


def choose_adapter(name: str, adapters: Sequence[Adapter]) -> Adapter:
    """Return the adapter named `name`. Raises: NotFound."""
    for adapter in adapters:
        if adapter.name == name:
            return adapter
    raise NotFound("model", name)


LAST_TOKEN_POOLER = Pooler()
MOST_TOKENIZED = 1 << 16  # a Tokenize call may have this many tokens even if the model's context is smaller


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves. It checks and prepares requests."""

    name: str
    fingerprint: bytes
    max_model_len: int  # maximum number of tokens of prompt and answer together
    vocab_size: int
    dtype: str
    block_tokens: int
    tokenizer: TokenizerWorker
    defaults: GenerationDefaults
    forms: FormChecker
    family: str = ""  # `model_type` of the model's config.json; empty if absent
    pooler: Pooler | PoolingRefused = LAST_TOKEN_POOLER
    groups: BlockGroups = ONE_GROUP
    weights: str = ""  # digest of the weights that the workers were started with

    def check_answers(self) -> None:
        """Check that the model generates answers. Raises: InvalidArgument."""
        if isinstance(self.pooler, Pooler) and self.pooler.kind is not ModelKind.LANGUAGE_MODEL:
            raise InvalidArgument("model", f"{self.name} ({self.family}) is {self.pooler.kind}")

    def pooled_alone(self) -> Pooling | None:
        """Return the pooling of a model that cannot generate text; None for a language model."""
        pooler = self.pooler
        if isinstance(pooler, PoolingRefused) or pooler.kind is ModelKind.LANGUAGE_MODEL:
            return None
        return pooler.pooling if pooler.score is None else pooler.score.pooling

    def vectors(self) -> Pooler:
        """Return the pooler, which defines the vectors. Raises: InvalidArgument for unsupported pooling."""
        if isinstance(self.pooler, PoolingRefused):
            raise InvalidArgument("model", f"its pooling is not supported: {self.pooler}")
        return self.pooler

    async def prepare(
        self, valid: ValidRequest, adapter: Adapter | None = None, max_context_tokens: int | None = None
    ) -> PreparedRequest:
        """Check the request's forms and its length; tokenise and hash the prompt on other threads.

        `max_context_tokens`: the client's limit of prompt and answer. Raises: InvalidArgument, ResourceExhausted,
        Unavailable.
        """
        for form in (valid.own_form, form_of(valid.sampling.structured)):
            if form is not None:
                await self.forms.check(form, valid.tenant)
        context = self.max_context(max_context_tokens)
        adapted = adapter.digest if adapter is not None else ""
        root = root_hash(self.fingerprint, self.dtype, adapted, valid.cache_salt, valid.key_salt)
        is_salted = bool(valid.cache_salt or valid.key_salt)
        try:
            valid, prompt = await self._joined(valid, context)
            token_ids, names, packed_tokens = await self.tokenizer.read(
                prompt, root, self.block_tokens, context, self.vocab_size, valid.tenant
            )
        except TextTooLong as error:
            raise prompt_too_long(
                valid.prompt_field, error.least_tokens, context, not error.counted, valid.pooling is not None
            ) from None
        self._check_embedded(valid.prompt_field, token_ids)
        max_tokens = fit_to_context(len(token_ids), valid, context)
        bad_words = await self.tokenizer.bad_words(valid.bad_words)
        rules = replace(valid.sampling.rules, bad_words=valid.sampling.rules.bad_words + bad_words)
        sampling = replace(valid.sampling, max_tokens=max_tokens, rules=rules)
        check_something_is_left(sampling)
        fields = {each.name: getattr(valid, each.name) for each in dataclasses.fields(valid)}
        return PreparedRequest(
            **(fields | {"sampling": sampling}),
            token_ids=token_ids,
            packed_tokens=packed_tokens,
            cache_root=root,
            block_hashes=names,
            fingerprint=self.fingerprint,
            block_tokens=self.block_tokens,
            groups=self.groups,
            echo_text=await self._text(prompt, token_ids) if valid.echo else "",
            adapter=adapter,
            plain_root=root_hash(self.fingerprint, self.dtype, adapted) if is_salted else root,
        )

    def _check_embedded(self, field: str, token_ids: Sequence[int]) -> None:
        """Check a prompt's tokens if the tokenizer has more tokens than the model. Raises: InvalidArgument."""
        if self.tokenizer.size > self.vocab_size and max(token_ids, default=0) >= self.vocab_size:
            raise InvalidArgument(field, f"has token {max(token_ids)}, but the model has {self.vocab_size} tokens")

    async def _joined(self, valid: ValidRequest, most_tokens: int) -> tuple[ValidRequest, Prompt]:
        """Replace a pair of texts, or a text to embed that may be cut, by its tokens. Return request and prompt.

        Raises: TextTooLong.
        """
        pair = valid.prompt
        if not isinstance(pair, PairPrompt):
            return valid, pair if valid.pooling is None else await self.tokenizer.cut(pair, valid.tenant)
        token_ids, second_from = await self.tokenizer.encode_pair(pair, most_tokens, valid.tenant)
        pooling = None if valid.pooling is None else replace(valid.pooling, second_from=second_from)
        return replace(valid, pooling=pooling), TokenPrompt(token_ids)

    async def tokenize(self, text: str, add_special_tokens: bool, tenant: str = "") -> tuple[int, ...]:
        """Tokenise a text for a client that only requests its tokens. Raises: InvalidArgument."""
        check_text("text", text)
        return await self._tokens("text", self.tokenizer.encode(text, add_special_tokens, self._most_tokenized, tenant))

    async def tokenize_chat(self, prompt: ChatPrompt, tenant: str = "") -> tuple[int, ...]:
        """Tokenise a chat for a client that only requests its tokens. Raises: InvalidArgument, Unavailable."""
        checked = check_chat(prompt, MAX_TEXT_BYTES)
        tokens = self.tokenizer.prompt_tokens(checked, self._most_tokenized, tenant=tenant)
        return await self._tokens("messages", tokens)

    @property
    def _most_tokenized(self) -> int:
        return max(self.max_model_len, MOST_TOKENIZED)

    async def _tokens(self, field: str, tokens: Awaitable[tuple[int, ...]]) -> tuple[int, ...]:
        """Await token ids. Raises: InvalidArgument for `field` instead of TextTooLong."""
        try:
            return await tokens
        except TextTooLong as error:
            raise InvalidArgument(field, f"{error}; at most {self._most_tokenized} are allowed") from None

    def max_context(self, allowed_tokens: int | None) -> int:
        """Return the maximum number of tokens of prompt and answer for a client whose own limit is `allowed_tokens`."""
        return self.max_model_len if allowed_tokens is None else min(allowed_tokens, self.max_model_len)

    def close(self) -> None:
        self.tokenizer.close()
        self.forms.close()

    async def _text(self, prompt: Prompt, token_ids: tuple[int, ...]) -> str:
        """Return the text of a prompt: as given, or decoded from its tokens."""
        return prompt.text if isinstance(prompt, TextPrompt) else await self.tokenizer.decode(token_ids, True)


class ModelGate:
    """Gate at which requests wait until the router is ready and its model is known."""

    def __init__(self, wait_s: float) -> None:
        """Create a closed gate. `wait_s`: maximum time that a request waits at it."""
        self.served: ServedModel | None = None
        self.detail = "waiting for workers"
        self._wait_s = wait_s
        self._is_open = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._is_open.clear()

    async def model(self) -> ServedModel:
        """Wait for the open gate and return the model. Raises: Unavailable after `wait_s`."""
        if not self.is_open:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._is_open.wait()
            except TimeoutError:
                raise Unavailable(f"not ready: {self.detail}", "NOT_READY", RETRY_AFTER_S) from None
        if self.served is None:
            raise RuntimeError("the gate was opened although no model is loaded")
        return self.served


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """Model that a request names. `adapter`: a LoRA adapter, or weights that replaced the model's; None: neither."""

    served: ServedModel
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        return self.served.name if self.lora is None else self.lora.name

    @property
    def lora(self) -> Adapter | None:
        return None if self.adapter is None or self.adapter.name == WEIGHTS else self.adapter

    @property
    def version(self) -> str:
        """Version of the weights, followed by `+` and the version of an adapter. Equal versions compute the same."""
        if self.lora is not None:
            return f"{version_of(self.served.weights)}+{version_of(self.lora.digest)}"
        return version_of(self.served.weights if self.adapter is None else self.adapter.digest)


class ServedModelSettings(NamedTuple):
    """Settings of the served model. `folder`, `name`: used instead of those that the workers report, unless None.

    `known_prompt_bytes`: memory for the cache of prompt prefixes. `tool_format`: format of tool calls; empty: it is
    detected.
    """

    folder: Path | None
    name: str | None
    known_prompt_bytes: int
    tool_format: str


def load_served_model(description: WorkerDescription, source: ServedModelSettings) -> ServedModel:
    """Read the tokenizer and defaults of the model that a worker describes. Blocks. Raises: ModelFolderError."""
    model = description.model
    path = source.folder or Path(model.path)
    tokenizer = load_tokenizer(path, source.known_prompt_bytes, source.tool_format)
    defaults = read_generation_defaults(path)
    if tokenizer.source is not None:
        defaults = replace(defaults, eos_token_ids=defaults.eos_token_ids | tokenizer.source.end_token_ids)
    return ServedModel(
        name=source.name or model.name,
        fingerprint=description.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        block_tokens=model.block_tokens,
        groups=model.groups,
        tokenizer=tokenizer,
        defaults=defaults,
        forms=FormChecker(Setup(str(path.resolve()), model.vocab_size, tuple(sorted(defaults.eos_token_ids)))),
        family=read_family(path),
        pooler=_pooler(path),
        weights=weights_digest(description.checkpoint or description.fingerprint),
    )


def _pooler(folder: Path) -> Pooler | PoolingRefused:
    """Return the checkpoint's pooler, or the error with which requests for vectors must fail."""
    try:
        return read_pooler(folder)
    except PoolingRefused as refused:
        return refused
