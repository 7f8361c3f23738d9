"""Check of placements: each recorded placement is decided again from its recorded inputs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.lab.replay.record import IncidentRecord, RecordedPlacement, RecordedRequest
from baton.router.placement.decide import NoRoom, Placement, PlacementPolicy, decide, placement_of
from baton.router.trace.record import KEPT_CANDIDATES
from baton.router.types.placement import WorkerView


@dataclass(frozen=True, slots=True)
class PlacementDifference:
    """Placement that differs from the recorded one. `changed`: names of the fields that differ; empty: not placed."""

    request_id: str
    recorded: RecordedPlacement
    again: Placement | NoRoom
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacementCheck:
    """Result of the check. `unchecked`: placements by another router, or with more candidates than are recorded."""

    checked: int
    unchecked: int
    differences: tuple[PlacementDifference, ...]


def check_placements(record: IncidentRecord) -> PlacementCheck:
    """Decide all recorded placements again, and return those that differ, in the order of the requests."""
    checked = unchecked = 0
    differences: list[PlacementDifference] = []
    for request in record.requests:
        for each in request.placements:
            if each.workers is None or len(each.workers) >= KEPT_CANDIDATES:
                unchecked += 1
                continue
            checked += 1
            difference = _difference(request, each, each.workers, record.settings.policy)
            if difference is not None:
                differences.append(difference)
    return PlacementCheck(checked, unchecked, tuple(differences))


def _difference(
    request: RecordedRequest, recorded: RecordedPlacement, workers: Sequence[WorkerView], policy: PlacementPolicy
) -> PlacementDifference | None:
    again = _placed(recorded, workers, policy)
    if isinstance(again, NoRoom):
        return PlacementDifference(request.request_id, recorded, again, ())
    changed = changed_fields(recorded.placement, again)
    return PlacementDifference(request.request_id, recorded, again, changed) if changed else None


def _placed(recorded: RecordedPlacement, workers: Sequence[WorkerView], policy: PlacementPolicy) -> Placement | NoRoom:
    asked = recorded.request
    if recorded.first_token_in_ms is not None:
        asked = replace(asked, first_token_in_ms=recorded.first_token_in_ms)  # less time is left after a wait
    decision = decide(asked, workers, policy)
    return decision if isinstance(decision, NoRoom) else placement_of(recorded.request, decision, policy)


def changed_fields(recorded: Placement, again: Placement) -> tuple[str, ...]:
    """Return the names of the fields in which two placements differ."""
    return tuple(name for name, value in recorded._asdict().items() if value != getattr(again, name))
