"""The served model: its workers' description, tokenizer and adapters. Prepares requests for placement."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from baton.generation.block_hash import root_hash
from baton.router.model.defaults import GenerationDefaults, read_generation_defaults
from baton.router.model.form_checker import FormChecker
from baton.router.model.form_process import Setup
from baton.router.model.tokenizer import TextTooLong, TokenizerWorker, load_tokenizer
from baton.router.model.validation import (
    check_something_is_left,
    check_text,
    fit_to_context,
    prompt_too_long,
)
from baton.router.placement.cluster import Worker
from baton.router.types.request import PreparedRequest, Prompt, TextPrompt, ValidRequest
from baton.router.types.worker import Adapter, WorkerDescription
from baton.service.errors import InvalidArgument, NotFound
from baton.service.registry.worker_record import WorkerRole


def served_adapters(workers: Sequence[Worker], fingerprint: bytes, needed: Set[WorkerRole]) -> tuple[Adapter, ...]:
    """Those that workers of every needed role have, of this model; sorted by name.

    Where workers have different ones under a name, as while they are replaced, it is the one that more of them have.
    """
    holders: dict[Adapter, list[WorkerRole]] = {}
    for worker in workers:
        if worker.held and worker.description is not None and worker.description.fingerprint == fingerprint:
            for adapter in worker.description.adapters:
                holders.setdefault(adapter, []).append(worker.role)
    by_name: dict[str, Adapter] = {}
    whole = [adapter for adapter, roles in holders.items() if needed <= set(roles)]
    for adapter in sorted(whole, key=lambda adapter: (len(holders[adapter]), adapter.digest)):
        by_name[adapter.name] = adapter
    return tuple(by_name[name] for name in sorted(by_name))


def choose_adapter(name: str, model: str, adapters: Sequence[Adapter]) -> Adapter | None:
    """None where the name is the model's own, or empty. Raises: NotFound."""
    if name in ("", model):
        return None
    for adapter in adapters:
        if adapter.name == name:
            return adapter
    raise NotFound("model", name)


MOST_TOKENIZED = 1 << 16  # at once, or as many as the model takes


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    fingerprint: bytes
    max_model_len: int  # prompt plus answer, in tokens
    vocab_size: int
    dtype: str
    block_tokens: int
    tokenizer: TokenizerWorker
    defaults: GenerationDefaults
    forms: FormChecker

    async def prepare(
        self, valid: ValidRequest, adapter: Adapter | None = None, max_context_tokens: int | None = None
    ) -> PreparedRequest:
        """Tokenises and hashes the prompt, off the event loop. Raises: InvalidArgument."""
        if valid.structured is not None:
            await self.forms.check(valid.structured)
        context = self.max_context(max_context_tokens)
        try:
            token_ids = await self.tokenizer.prompt_tokens(valid.prompt, context, self.vocab_size)
        except TextTooLong as error:
            raise prompt_too_long(valid.prompt_field, error.least_tokens, context, or_more=not error.counted) from None
        max_tokens = fit_to_context(len(token_ids), valid, context)
        sampling = valid.sampling(max_tokens, await self.tokenizer.bad_words(valid.bad_words))
        check_something_is_left(sampling)
        adapted = adapter.digest if adapter is not None else ""
        root = root_hash(self.fingerprint, self.dtype, adapted, valid.cache_salt, valid.key_salt)
        return PreparedRequest(
            valid=valid,
            token_ids=token_ids,
            cache_root=root,
            block_hashes=await self.tokenizer.hash_blocks(root, token_ids, self.block_tokens),
            sampling=sampling,
            fingerprint=self.fingerprint,
            block_tokens=self.block_tokens,
            echo_text=await self._text(valid.prompt, token_ids) if valid.echo else "",
            adapter=adapter,
        )

    async def tokenize(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """For a client that asks for tokens alone. Raises: InvalidArgument."""
        check_text("text", text)
        most_tokens = max(self.max_model_len, MOST_TOKENIZED)
        try:
            return await self.tokenizer.encode(text, add_special_tokens, most_tokens)
        except TextTooLong as error:
            raise InvalidArgument("text", f"{error}; at most {most_tokens} at once") from None

    def max_context(self, allowed_tokens: int | None) -> int:
        """Of prompt and answer, in tokens, for a client that is allowed so many; None: as many as the model takes."""
        return self.max_model_len if allowed_tokens is None else min(allowed_tokens, self.max_model_len)

    def close(self) -> None:
        self.tokenizer.close()
        self.forms.close()

    async def _text(self, prompt: Prompt, token_ids: tuple[int, ...]) -> str:
        """The text of a prompt, as it was given or as its tokens are spelled."""
        return prompt.text if isinstance(prompt, TextPrompt) else await self.tokenizer.decode(token_ids, True)


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model that a request names, perhaps with an adapter."""

    served: ServedModel
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        return self.served.name if self.adapter is None else self.adapter.name


def load_served_model(description: WorkerDescription, folder: Path | None, name: str | None) -> ServedModel:
    """Reads the tokenizer and defaults. `folder` and `name` override the worker's. Blocks.

    Raises: ModelFolderError.
    """
    model = description.model
    path = folder or Path(model.path)
    defaults = read_generation_defaults(path)
    return ServedModel(
        name=name or model.name,
        fingerprint=description.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        block_tokens=model.block_tokens,
        tokenizer=load_tokenizer(path),
        defaults=defaults,
        forms=FormChecker(Setup(str(path.resolve()), model.vocab_size, tuple(sorted(defaults.eos_token_ids)))),
    )
