"""How a request continues when an attempt has failed: with which tokens, after which pause, and when not at all. Pure.

Another attempt's prompt is the prompt and the part of the answer that was given out, so that no token is sampled
twice. Each unfinished choice becomes an attempt of its own: they have different tokens by then. If no token was given
out, the attempt begins again unchanged; so does a beam search, which gives out nothing before its end.

Progress is two new tokens. The first one comes with the computing of the prompt, even if its workers fail afterwards.
An attempt that made progress resets the count of failures: a long answer may lose many workers. `ALL_FACTOR`
bounds the cost of a request that fails again and again a little later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from router.block_hashing import block_hashes
from router.events import End, FailureReason
from router.failures import ABOUT_A_PAIR
from router.request import PreparedRequest, Sampling

PROGRESS_TOKENS = 2
ALL_FACTOR = 4
POISON_DEATHS = 3
SUSPECT_DEATHS = 2

_NOTICING_S = 0.2
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Tries:
    """The failed attempts at a request; at one of its choices, where that continues by itself."""

    failed: int = 0
    in_a_row: int = 0  # without progress; a worker that drained did not fail
    deaths: int = 0  # of processes, in a row, without progress

    def after(self, reason: FailureReason, fresh_tokens: int, died: bool) -> "Tries":
        """One more, which made so many new tokens. `died`: the process of a worker that was at it is gone."""
        progress = fresh_tokens >= PROGRESS_TOKENS
        return Tries(
            failed=self.failed + 1,
            in_a_row=(0 if progress else self.in_a_row) + (reason is not FailureReason.DRAINING),
            deaths=(0 if progress else self.deaths) + died,
        )

    def exhausted(self, attempts: int) -> bool:
        """`attempts` may fail one after another, and `ALL_FACTOR` times as many in all."""
        return self.in_a_row >= attempts or self.failed >= ALL_FACTOR * attempts

    @property
    def poisonous(self) -> bool:
        return self.deaths >= POISON_DEATHS

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    def pause_s(self, reason: FailureReason, turn: int) -> float:
        """Before the next attempt: none after a first failure, growing from there; `turn` spreads those of many.

        Where a worker's peer reported its death first, the pause is long enough that the death is noticed here.
        """
        noticing_s = _NOTICING_S if reason in ABOUT_A_PAIR else 0.0
        if self.in_a_row <= 1:
            return noticing_s
        longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2))
        return noticing_s + longest_s * (0.5 + turn % 8 / 16)


def end_of(sampling: Sampling, answered: tuple[int, ...]) -> End | None:
    """How a choice with these tokens has ended; None if it continues.

    An end comes with its token; it may be missing where the tokens come from the client or another router.
    """
    if answered and answered[-1] in sampling.stop_token_ids:
        return End.STOP
    return End.LENGTH if len(answered) >= sampling.max_tokens else None


def replays(
    whole: PreparedRequest, part: PreparedRequest, answers: Mapping[int, tuple[int, ...]]
) -> tuple[PreparedRequest, ...]:
    """The parts that are attempted instead of `part`, which failed.

    `answers` are its unfinished choices, each with its tokens that were given out; `whole` is the original request.
    """
    if whole.sampling.beams is not None or (len(answers) == len(part.choices) and not any(answers.values())):
        return (part,)
    return tuple(replay(whole, choice, answered) for choice, answered in answers.items())


def replay(whole: PreparedRequest, choice: int, answered: tuple[int, ...]) -> PreparedRequest:
    """One choice from where it is. Its hashes cover the answer too: some worker may have those blocks."""
    hashed_tokens = len(whole.block_hashes) * whole.block_tokens
    parent = whole.block_hashes[-1] if whole.block_hashes else whole.cache_root
    further = block_hashes(parent, (*whole.token_ids[hashed_tokens:], *answered), whole.block_tokens)
    return replace(
        whole,
        token_ids=(*whole.token_ids, *answered),
        block_hashes=(*whole.block_hashes, *further),
        sampling=replace(whole.sampling, n=1, prompt_logprobs=None),
        answered_tokens=len(answered),
        first_choice=choice,
    )
