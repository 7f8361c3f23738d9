"""Record of a bundle (`record.json`): settings, requests with their placements, and the steps of each worker."""

import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.bundle.decided import FORMAT
from baton.client.timelines import ProcessTimeline
from baton.launch import CommandFailed
from baton.router.placement.decide import Placement, PlacementPolicy
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.plain import from_plain
from baton.router.types.request import Sampling

NAME = "record.json"


@dataclass(frozen=True, slots=True)
class RecordedPlacement:
    """Placement of one attempt with its inputs. `workers`: None if another router placed it."""

    placed_us: int
    answered_tokens: int
    failure: str
    request: PlacementRequest
    workers: tuple[WorkerView, ...] | None
    first_token_in_ms: float | None
    placement: Placement


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """Token ids of a request, and its sampling parameters. `answers`: tokens of each choice that reached the client."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """Request as its router recorded it. Times are microseconds since 1970."""

    request_id: str
    began_us: int
    block_tokens: int
    blocks: tuple[int, ...]  # numbers of the prompt's complete blocks: equal for equal prefixes
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    choices: int
    priority: int
    pooled: bool
    needs_every_token: bool
    cached_tokens: int
    outcome: str
    ttft_ms: float  # 0: it had no token
    return_ms: float
    placements: tuple[RecordedPlacement, ...]
    tokens: RecordedTokens | None = None  # None: the router kept none, or the bundle was written without

    @property
    def has_adapter(self) -> bool:
        """Return whether weights other than the checkpoint's computed it."""
        return any(each.request.adapter is not None for each in self.placements)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of a router that decide about placements."""

    policy: PlacementPolicy
    ttft_slo_ms: float
    tbt_slo_ms: float


@dataclass(frozen=True, slots=True)
class IncidentRecord:
    """Content of a record. `requests`: in the order of their arrival."""

    settings: RouterSettings
    requests: tuple[RecordedRequest, ...]
    workers: tuple[ProcessTimeline, ...]

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the model that served; empty without placements."""
        placements = (placed for request in self.requests for placed in request.placements)
        return next((placed.request.fingerprint for placed in placements), b"")

    def of_role(self, role: str) -> Sequence[ProcessTimeline]:
        return [each for each in self.workers if each.role == role]


def read_record(bundle: Path) -> IncidentRecord:
    """Read the record of a bundle, or a record.json. Raises: CommandFailed."""
    try:
        plain = json.loads(_content(bundle))
    except (OSError, tarfile.TarError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{bundle}: cannot read the bundle: {error}") from error
    except ValueError as error:
        raise CommandFailed(f"{bundle}: {NAME} is not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise CommandFailed(f"{bundle}: {NAME} has another format than this release reads, which is {FORMAT}")
    try:
        return record_from(plain)
    except (KeyError, TypeError, ValueError) as error:
        raise CommandFailed(f"{bundle}: {NAME} is incomplete or of another release: {error!r}") from error


def _content(bundle: Path) -> bytes:
    """Return the bytes of the record. Raises: OSError, TarError, CommandFailed."""
    if bundle.suffix == ".json":
        return bundle.read_bytes()
    with tarfile.open(bundle) as archive:
        for entry in archive:
            if entry.name.rpartition("/")[2] == NAME and (file := archive.extractfile(entry)) is not None:
                return file.read()
    raise CommandFailed(f"{bundle}: has no {NAME}; no router answered when it was written, or it is of an old release")


def record_from(plain: Mapping[str, Any]) -> IncidentRecord:
    """Return the record of its JSON. Raises: KeyError, TypeError, ValueError."""
    routers = [each for each in plain["processes"] if each["role"] == "router"]
    workers = [from_plain(ProcessTimeline, each) for each in plain["processes"] if each["role"] != "router"]
    requests = [_request(each) for router in routers for each in router.get("requests", ()) if each.get("decided")]
    return IncidentRecord(
        from_plain(RouterSettings, routers[0]["decided"]),
        tuple(sorted(requests, key=lambda each: each.began_us)),
        tuple(sorted(workers, key=lambda each: each.name)),
    )


def _request(plain: Mapping[str, Any]) -> RecordedRequest:
    return from_plain(
        RecordedRequest, {**plain["decided"], "request_id": plain["request_id"], "began_us": plain["began_us"]}
    )
