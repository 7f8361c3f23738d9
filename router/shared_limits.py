"""What API keys use at the other routers, as far as it has reached this one: each router reports with its share what it
has admitted since it started, and the increase is charged here. Pure.

What several routers admit within two of their periods and a round trip of each other (0.25 s) is not yet known to the
others: by so much the requests that begin at once may exceed a limit; of requests and tokens a minute the excess is
paid back. Without Redis each router counts alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from router.key_limits import KeyUse


class Taken(NamedTuple):
    """Used at another router since its last report."""

    tenant: str
    requests: int
    tokens: int


class SharedLimits:
    def __init__(self) -> None:
        self._heard: dict[bytes, dict[str, KeyUse]] = {}

    def take(self, router_id: bytes, uses: Mapping[str, KeyUse]) -> Iterator[Taken]:
        """The increase in a router's newest share. Of a router's first share nothing counts, only later increases: a
        restart begins anew.
        """
        known = self._heard.get(router_id)
        self._heard[router_id] = dict(uses)
        if known is None:
            return
        for tenant, use in uses.items():
            before = known.get(tenant, KeyUse(0, 0, 0))
            if use.requests > before.requests or use.tokens > before.tokens:
                yield Taken(tenant, use.requests - before.requests, use.tokens - before.tokens)

    def keep(self, routers: Iterable[bytes]) -> None:
        """Forgets those that are gone."""
        heard = set(routers)
        for router_id in self._heard.keys() - heard:
            del self._heard[router_id]

    def active(self) -> dict[str, int]:
        """By key, at all other routers together."""
        total: dict[str, int] = {}
        for uses in self._heard.values():
            for tenant, use in uses.items():
                total[tenant] = total.get(tenant, 0) + use.active
        return total
