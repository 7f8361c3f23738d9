"""One worker as the cluster keeps it: connected or not, its last report, this router's charges on it. Pure state."""

from dataclasses import dataclass, field

from router.candidates import WorkerRates, WorkerView
from router.charges import Charges
from router.departures import End
from router.forward import ForwardProgress
from router.shared_view import ElsewhereLoad
from router.worker import WorkerDescription, WorkerReport, WorkerRole


@dataclass(slots=True)
class Worker:
    """One endpoint. `description` and `epoch` stay as last seen while it is not connected."""

    endpoint: str
    role: WorkerRole
    connected: bool = False
    held: bool = False  # a session is up, or in its grace: requests on it may continue
    description: WorkerDescription | None = None
    epoch: int = 0
    report: WorkerReport | None = None
    charges: Charges = field(default_factory=Charges)
    end: End = End.NONE  # of its last session
    died_s: float | None = None  # when its process was last noticed to be gone, monotonic
    progress: ForwardProgress = field(default_factory=ForwardProgress)
    stalled: bool = False  # it has work and takes no steps
    view: WorkerView | None = None  # for a prompt of which it has nothing, while nothing changes; never changed itself
    hit_view: WorkerView | None = None  # the same, for the last prompt of which it had something

    @property
    def able(self) -> bool:
        """It takes work now."""
        known = self.description is not None and self.report is not None and not self.report.draining
        return known and self.connected and not self.stalled

    def changed(self) -> None:
        """The views that placements used of it are outdated."""
        self.view = self.hit_view = None

    def seen(
        self,
        elsewhere: ElsewhereLoad,
        recent_tokens: float,
        rates: WorkerRates,
        hit_blocks: int,
        ready_blocks: int,
        branches: int,
    ) -> WorkerView:
        """As a placement sees it, for a prompt of which it has so much."""
        description, report = self.description, self.report
        if description is None or report is None:
            raise RuntimeError(f"{self.endpoint} has not said what it is")
        return WorkerView(
            endpoint=self.endpoint,
            role=self.role,
            fingerprint=description.fingerprint,
            total_blocks=description.total_blocks,
            total_slots=description.total_slots,
            limit_blocks=report.limit_blocks,
            limit_slots=report.limit_slots,
            used_blocks=self.charges.blocks,
            used_slots=self.charges.slots,
            tokens_in_flight=self.charges.tokens + elsewhere.tokens,
            hit_blocks=hit_blocks,
            adapters=description.adapters,
            ready_blocks=ready_blocks,
            elsewhere_slots=elsewhere.slots,
            elsewhere_blocks=elsewhere.blocks,
            # Prompts just sent there are in no report yet; prompts of other routers are known from reports alone.
            pending_prompt_tokens=max(report.pending_tokens, self.charges.prompt_tokens),
            recent_tokens=recent_tokens,
            rates=rates,
            branches=branches,
        )
