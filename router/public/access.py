"""Access rules for gRPC and HTTP. All callers with the same API key are one tenant. Pure."""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from baton.process.errors import PermissionDenied, Unauthenticated
from baton.process.objectives import NONE_REQUESTED, RequestedObjectives
from baton.process.security.api_keys import UNLIMITED, ApiKey, KeyLimits, KeyRing
from baton.router.request.resume import ResumeRequest
from baton.router.types.request import GenerationRequest

_SCHEME = "bearer"
_DIGITS = 32


def tenant_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the tenant of the API key in a call's metadata; empty without a key."""
    key = bearer_of(metadata)
    return tenant_of_key(key) if key else ""


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the API key in a call's metadata (`authorization: Bearer KEY` or Anthropic's `x-api-key`), or ""."""
    for name, value in metadata:
        if name == "x-api-key" and isinstance(value, str) and value.strip():
            return value.strip()
        if name == "authorization" and isinstance(value, str):
            scheme, _, key = value.partition(" ")
            if scheme.lower() == _SCHEME and key.strip():
                return key.strip()
    return ""


def tenant_of_key(api_key: str) -> str:
    """Return the tenant that an API key identifies if no keys are configured: the beginning of the key's digest."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:_DIGITS]


Metadata = Iterable[tuple[str, str | bytes]]

_HEALTH = "/grpc.health.v1.Health/"


class Need(Enum):
    """Permission that an HTTP route or gRPC method requires of its caller; by default an API key."""

    NOTHING = "nothing"
    KEY = "key"
    ADMIN = "admin"  # an admin key, whose holder may see all tenants


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a call. `tenant`: name of its API key; if no keys are configured, a digest of the key that it sent."""

    tenant: str = ""
    limits: KeyLimits = UNLIMITED
    key_salt: bytes = b""  # salt of block hashes; empty: cached prompts are shared with other callers
    objectives: RequestedObjectives = NONE_REQUESTED  # latency objectives of the key

    def asks(self, request: GenerationRequest) -> GenerationRequest:
        """Return a copy of the request with this caller's tenant, limits and salt, and its objectives where the request
        sets none.
        """
        objectives = request.objectives.or_else(self.objectives)
        return replace(request, tenant=self.tenant, limits=self.limits, key_salt=self.key_salt, objectives=objectives)

    def resumes(self, asked: ResumeRequest) -> ResumeRequest:
        """Return a copy of the resume request with this caller's tenant, limits and salt."""
        request = self.asks(asked.request) if asked.request is not None else None
        return replace(asked, tenant=self.tenant, request=request)


class Access:
    """Access control by API keys. `ring` returns the current keys; None: every caller may do everything."""

    def __init__(self, ring: Callable[[], KeyRing] | None = None) -> None:
        self._ring = ring

    @property
    def is_guarded(self) -> bool:
        return self._ring is not None

    @property
    def limits(self) -> Mapping[str, KeyLimits]:
        """Limits of all valid API keys, by name of the key."""
        return {} if self._ring is None else {key.name: key.limits for key in self._ring()}

    def caller(self, need: Need, metadata: Metadata) -> Caller:
        """Identify the caller by the API key in the metadata. Raises: Unauthenticated, PermissionDenied.

        `need`: permission that the call requires.
        """
        if self._ring is None:
            return Caller(tenant_of(metadata))
        if need is Need.NOTHING:
            return Caller()
        secret = bearer_of(metadata)
        if not secret:
            raise Unauthenticated("an API key is required: authorization: Bearer KEY", "MISSING_API_KEY")
        key = self._ring().find(secret)
        if key is None:
            raise Unauthenticated("the API key is unknown", "INVALID_API_KEY")
        if need is Need.ADMIN and not key.is_admin:
            raise PermissionDenied("this call requires an admin API key", "NOT_ADMIN")
        return _caller_of(key)

    def caller_named(self, tenant: str) -> Caller | None:
        """Return the caller of a tenant, for work that outlives its call; None if its API key was removed."""
        if self._ring is None:
            return Caller(tenant)
        found = (key for key in self._ring() if key.name == tenant)
        return next((_caller_of(key) for key in found), None)

    def authorise(self, method: str, metadata: Metadata) -> Caller:
        """Identify the caller of a gRPC method; the health service needs no key. Raises: Unauthenticated."""
        return self.caller(Need.NOTHING if method.startswith(_HEALTH) else Need.KEY, metadata)


def _caller_of(key: ApiKey) -> Caller:
    return Caller(key.name, key.limits, key.key_salt, key.objectives)


class AdminAccess:
    """Access control of the admin port: by its token or an admin key. Without both, every caller has access."""

    def __init__(self, access: Access, token: Callable[[], str] | None) -> None:
        """Create the control. `token` returns the port's token, derived from the cluster secret; None: no secret."""
        self._access = access
        self._token = token

    @property
    def is_guarded(self) -> bool:
        return self._token is not None or self._access.is_guarded

    def authorise(self, method: str, metadata: Metadata) -> None:
        """Check that the caller may call the gRPC method. Raises: Unauthenticated, PermissionDenied."""
        if method.startswith(_HEALTH):
            return
        given = tuple(metadata)
        if self._token is not None and hmac.compare_digest(bearer_of(given).encode(), self._token().encode()):
            return
        if self._access.is_guarded:
            self._access.caller(Need.ADMIN, given)
        elif self._token is not None:
            raise Unauthenticated("the admin port requires the cluster's secret (BATON_SECRET_FILE)", "NO_SECRET")
