"""State of one Start command on a decode worker, and the messages about it to the router. Does no I/O."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.decode_worker.credits import NO_CHARGE, Charge
from baton.decode_worker.retained import RetainedOutputs
from baton.engine.request import EndReason, FirstToken, end_reason
from baton.engine.runner.step_records import StepTiming
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.sequences import PromptComputed, TokenMade
from baton.protos import session_pb2
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.worker.request import Link, OpenRequest, PromptProgress
from baton.worker.transfer.reader import ConfirmedBlocks, Pull
from baton.worker.wire import END_REASONS, add_logprobs


@dataclass(frozen=True, slots=True)
class ReceivedKv:
    """Prompt KV that was received from a prefill worker but not yet reported to the router."""

    pull: Pull
    cached_tokens: int  # prompt tokens cached here before the pull
    validated: float  # when the copy was confirmed, monotonic seconds


@dataclass(eq=False)
class Answer(OpenRequest):
    """Request on a decode worker, from the arrival of its command until its last token or the abort."""

    retained: RetainedOutputs
    running_choices: set[int]
    searches: bool  # beam search: output is sent when it is complete
    is_pooled: bool  # embedding: no tokens are generated
    charge: Charge  # blocks and slots that the router has reserved for the request
    last_block: bytes = b""  # hash of the prompt's last complete block; empty: not cached
    task: "asyncio.Task[None] | None" = None
    received_kv: ReceivedKv | None = None
    prefill: PromptProgress | None = None  # None: a prefill worker computes the prompt, or it is complete
    pooled: tuple[float, ...] = ()  # computed embedding
    adopted: bool = False  # True: taken over by another router
    confirmed: ConfirmedBlocks = field(default_factory=ConfirmedBlocks)  # blocks confirmed during the pull
    keeps_landed: bool = False  # whether confirmed blocks stay cached for another attempt
    # First tokens from the prefill worker, by choice; each is removed when an output repeats it.
    first_tokens: dict[int, FirstToken] = field(default_factory=dict)
    tokens_together: int = 1  # number of tokens of a choice that may be sent together
    held: dict[int, int] = field(default_factory=dict)  # number of unsent tokens, by choice that has sent an output

    @property
    def begins(self) -> bool:
        """Return whether a message about the first step may have to be sent."""
        return self.prefill is not None or self.received_kv is not None

    @property
    def is_plain(self) -> bool:
        """Return whether each token is sent with its step, without log-probabilities or any message before it."""
        has_more = self.prefill or self.received_kv or self.first_tokens or self.searches or self.retained.with_logprobs
        return self.tokens_together == 1 and not has_more

    @property
    def answered_tokens(self) -> int:
        """Number of tokens that earlier attempts have sent."""
        return len(self.retained.answered)

    @property
    def confirmed_blocks(self) -> int:
        """Number of blocks from an incomplete pull that stay cached, so that the next attempt need not pull them."""
        return self.confirmed.blocks if self.keeps_landed else 0

    def land(self, received_kv: ReceivedKv, params: SamplingParams) -> None:
        self.received_kv = received_kv
        if self.searches:
            return
        first_tokens = received_kv.pull.first_tokens
        self.first_tokens = {first.choice: first for first in first_tokens}
        self.running_choices = {first.choice for first in first_tokens if first.end is None}
        for first in first_tokens:
            self.retained.add(first.choice, first, end_reason(params, first.token_id, self.answered_tokens))

    def adopt(self, link: Link, attempt_id: int) -> None:
        """Move the answer to another router, which receives all retained tokens."""
        self.link, self.attempt_id, self.adopted = link, attempt_id, True
        self.tokens_together = 1
        self.first_tokens.clear()
        self.held.clear()

    def take_chunk(self, computed: PromptComputed, timing: StepTiming) -> session_pb2.ConnectResponse | None:
        """Record a computed chunk of the prompt; return the message with log-probabilities of prompt tokens, if any."""
        if self.prefill is None:
            return None
        tokens = self.prefill.record(computed, timing)
        if self.is_pooled and computed.ended:
            self.pooled = computed.pooled
            self.running_choices.clear()
        self.times.add_chunk(timing.started, timing.ended, tokens)
        return self.prefill.scores(self.attempt_id, computed)

    def take(self, made: TokenMade, may_wait: bool = False) -> session_pb2.SequenceOutput | None:
        """Record a generated token; return the output to send. None if FirstStep carries the token, or if it waits for
        later ones (`may_wait`).
        """
        self.retained.add(made.choice, made.drawn, made.end)
        if made.end is not None:
            self.running_choices.discard(made.choice)
        if self.prefill is None or self.searches:
            held = self.held.get(made.choice)
            if may_wait and made.end is None and held is not None and held + 1 < self.tokens_together:
                self.held[made.choice] = held + 1
                return None
            return self._output(made, held or 0)
        drawn = made.drawn
        self.prefill.first.append(FirstToken(made.choice, drawn.token_id, drawn.logprob, made.end, drawn.top))
        return None

    def take_beginnings(self, timing: StepTiming) -> Iterator[session_pb2.ConnectResponse]:
        """Yield the messages of a first step: timings of received KV, or first tokens of a prompt computed here."""
        landed, first_step = self.take_landed(timing), self.take_first_step()
        if landed is not None:
            yield session_pb2.ConnectResponse(landed=landed)
        if first_step is not None:
            yield session_pb2.ConnectResponse(first_step=first_step)

    def take_first_step(self) -> session_pb2.FirstStep | None:
        """Return a message with the first tokens of a prompt computed here; None if unknown or already returned."""
        prefill = self.prefill
        if prefill is None or not prefill.ended:
            return None
        self.prefill = None
        logprobs, answered_tokens = self.retained.with_logprobs, self.answered_tokens
        first_step = prefill.first_step(self.attempt_id, prefill.first, logprobs, answered_tokens)
        first_step.pooled.extend(self.pooled)
        return first_step

    def take_landed(self, timing: StepTiming) -> session_pb2.Landed | None:
        """Return a message with the timings of a pull at the first call after the pull; later calls return None."""
        received_kv, self.received_kv = self.received_kv, None
        if received_kv is None:
            return None
        pull = received_kv.pull
        return session_pb2.Landed(
            attempt_id=self.attempt_id,
            bytes=pull.bytes,
            copy_ms=pull.copy_ms,
            exposed_ms=pull.exposed_ms,
            admission_ms=pull.late_ms + max(0.0, timing.started - received_kv.validated) * 1e3,
            first_step_ms=(time.monotonic() - timing.started) * 1e3,
            transport=pull.transport,
            cached_tokens=received_kv.cached_tokens,
        )

    def take_held(self) -> Iterator[session_pb2.SequenceOutput]:
        """Yield outputs with all tokens that wait for later ones."""
        for choice, count in self.held.items():
            if count:
                self.held[choice] = 0
                made = len(self.retained.choices[choice].token_ids)
                yield self._newest(choice, count, self.answered_tokens + made - count, None)

    def _output(self, made: TokenMade, held: int) -> session_pb2.SequenceOutput:
        """Build an output with the token after `held` others of its choice. A choice's first output repeats the prefill
        worker's token, which the router may lack.
        """
        if self.tokens_together > 1:
            self.held[made.choice] = 0
        earlier = held if self.first_tokens.pop(made.choice, None) is None else 1
        return self._newest(made.choice, earlier + 1, made.offset - earlier, made.end)

    def _newest(self, choice: int, count: int, offset: int, end: EndReason | None) -> session_pb2.SequenceOutput:
        """Build an output with the newest `count` tokens of a choice."""
        made = self.retained.choices[choice]
        output = session_pb2.SequenceOutput(
            attempt_id=self.attempt_id,
            choice=choice,
            offset=offset,
            token_ids=made.token_ids[-count:],
            end=END_REASONS[end],
        )
        for token in made.logged[-count:]:
            add_logprobs(output, token)
        return output


def extends_last(batch: session_pb2.StepOutputs, output: session_pb2.SequenceOutput) -> bool:
    """Append `output` to the last output of `batch` if both belong to one choice; return whether it was appended."""
    last = batch.outputs[-1] if batch.outputs else None
    if last is None or (last.attempt_id, last.choice) != (output.attempt_id, output.choice):
        return False
    offset = last.offset
    last.MergeFrom(output)
    last.offset = offset
    return True


def answer_to(
    command: session_pb2.Start, request_id: int, link: Link, block_tokens: int, groups: BlockGroups = ONE_GROUP
) -> Answer:
    sampling, first_choice = command.sampling, command.first_choice
    answered = command.token_ids[len(command.token_ids) - command.answered_tokens :]
    is_pooled = command.HasField("pooling")
    charge = Charge.of(
        len(command.token_ids),
        sampling.max_tokens - command.answered_tokens,
        max(sampling.n, sampling.beam_width),
        block_tokens,
        groups,
    )
    return Answer(
        request_id,
        link,
        command.attempt_id,
        RetainedOutputs(answered, with_logprobs=sampling.HasField("logprobs")),
        running_choices=set(range(first_choice, first_choice + sampling.n)),
        searches=sampling.beam_width > 0,
        is_pooled=is_pooled,
        tokens_together=max(1, command.tokens_together),
        charge=NO_CHARGE if is_pooled else charge,
        last_block=command.block_hashes[-1] if command.block_hashes else b"",
    )
