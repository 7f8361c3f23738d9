"""How a request goes on when an attempt at it has failed: with what, after which pause, and when not at all. Pure.

Another attempt's prompt is the prompt and what was given out of the answer, so that nothing is drawn twice. Of several
choices every unfinished one becomes an attempt of its own: they have grown differently by then. What nothing was given
out of begins again as it was; so does a beam search, which gives nothing out before its end.

Progress is two new tokens. One alone comes with the computing of the prompt, whatever befalls its workers afterwards.
An attempt that made progress takes back the failures before it: a long answer may see many workers go. `ALL_FACTOR`
bounds what a request may cost that fails again and again a little later.
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
    """The failed attempts at a request; at one of its choices, where that goes on by itself."""

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

        For the death of a worker, of which its peer has told first, it is long enough to be noticed here.
        """
        noticing_s = _NOTICING_S if reason in ABOUT_A_PAIR else 0.0
        if self.in_a_row <= 1:
            return noticing_s
        longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2))
        return noticing_s + longest_s * (0.5 + turn % 8 / 16)


def end_of(sampling: Sampling, answered: tuple[int, ...]) -> End | None:
    """How a choice has ended of which these tokens were made; None if it goes on.

    An end comes with its token; it may be missing where the tokens are told by somebody else.
    """
    if answered and answered[-1] in sampling.stop_token_ids:
        return End.STOP
    return End.LENGTH if len(answered) >= sampling.max_tokens else None


def replays(
    whole: PreparedRequest, part: PreparedRequest, answers: Mapping[int, tuple[int, ...]]
) -> tuple[PreparedRequest, ...]:
    """What is attempted instead of `part`, which failed.

    `answers` are its unfinished choices, with what was given out of each; `whole` is the request as it came.
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
