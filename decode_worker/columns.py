"""Tokens as columns of a step's message: a list per field takes a fraction of the time of a message per token.

Does no I/O.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.decode_worker.answer import Answer
from baton.decode_worker.gaps import Moment, StepGaps
from baton.decode_worker.retained import RetainedChoice
from baton.engine.runner.step_records import StepRecord
from baton.engine.scheduler.sequences import SchedulerOutcome, TokenMade
from baton.protos import session_pb2
from baton.worker.request import Link

COLUMN_PROTOCOL = 2
"""Oldest protocol whose routers read columns."""


@dataclass(slots=True)
class LinkOutputs:
    """Outputs of one step for one router. The lists are columns of `batch`, with an entry per token."""

    batch: session_pb2.StepOutputs = field(default_factory=session_pb2.StepOutputs)
    attempt_ids: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def message(self) -> session_pb2.ConnectResponse:
        for name in ("attempt_ids", "choices", "offsets", "token_ids"):
            getattr(self.batch, name).extend(getattr(self, name))
        return session_pb2.ConnectResponse(step_outputs=self.batch)


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    answer: Answer
    retained: RetainedChoice


class ColumnChoices:
    """Choices whose tokens need only columns: each is sent with its step, without log-probabilities."""

    def __init__(self, gaps: StepGaps, protocol: Callable[[Link], int]) -> None:
        """Start empty. `protocol`: returns the newest protocol of a router."""
        self._gaps = gaps
        self._protocol = protocol
        self._choices: dict[tuple[int, int], ColumnChoice] = {}  # by request id and choice

    def add(self, answer: Answer, choice: int) -> None:
        """Add a choice that has sent an output. It may be added already."""
        self._choices[answer.request_id, choice] = ColumnChoice(answer, answer.retained.choices[choice])

    def forget(self, answer: Answer) -> None:
        for choice in answer.retained.choices:
            self._choices.pop((answer.request_id, choice), None)

    def take(
        self,
        outcomes: Sequence[SchedulerOutcome],
        step: StepRecord,
        moment: Moment,
        outputs: defaultdict[Link, LinkOutputs],
    ) -> list[SchedulerOutcome]:
        """Record the tokens that need only columns, and add them to `outputs`. Return all other outcomes, in order."""
        others: list[SchedulerOutcome] = []
        choices, columns = self._choices, LinkOutputs()
        link: Link | None = None  # router of `columns`
        on_time: Moment | None = None
        for made in outcomes:
            if not isinstance(made, TokenMade) or made.end is not None or (found := choices.get(made[:2])) is None:
                others.append(made)
                continue
            answer, retained = found.answer, found.retained
            last = retained.moment
            if last is not on_time:  # most choices have the same last moment
                if last is None or self._gaps.is_late(last, step):
                    others.append(made)
                    continue
                on_time = last
            if answer.link is not link:
                if self._protocol(answer.link) < COLUMN_PROTOCOL:
                    others.append(made)
                    continue
                link = answer.link
                columns = outputs[link]
            retained.moment = moment
            token_id = made.drawn.token_id
            retained.token_ids.append(token_id)
            answer.times.tokens += 1
            answer.times.last_token_s = step.ended
            columns.attempt_ids.append(answer.attempt_id)
            columns.choices.append(made.choice)
            columns.offsets.append(made.offset)
            columns.token_ids.append(token_id)
        return others
