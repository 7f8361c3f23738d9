"""Order of pending requests: fair shares of tokens between tenants, strict order between priority classes. Pure.

The order in a class is start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal weights: a tenant's virtual
time is the number of its served tokens, and the tenant with the lowest is next. A tenant that becomes active starts at
the time of the tenant that was served last, so that no tenant saves up credit. The service of two tenants that are
always active differs by at most the sum of their largest requests. Tokens that other routers serve count, too
(`charge`), so that a tenant with connections to more routers gets no larger share.

SPARE_SHARE of the served tokens goes to lower-priority classes, first to the class with the oldest request, so that
no request starves.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SPARE_SHARE = 0.1
"""Fraction of the served tokens that lower-priority classes get while the first class has pending requests."""

MAX_AHEAD_TOKENS = 1 << 16
"""Maximum virtual time that other routers' service puts a tenant ahead: if they stop, it waits for as many tokens."""

Item = TypeVar("Item")


@dataclass(eq=False, slots=True)
class Entry(Generic[Item]):
    """Pending request in the fair queue. `number`: number of the arrival, from 1."""

    item: Item
    tenant: str
    priority: int  # lower is earlier
    tokens: int  # cost of serving the request, at least 1
    number: int


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    start: float  # virtual time at which the tenant's first pending request starts, in tokens
    tokens: int = 0  # sum over the tenant's pending requests
    entries: deque[Entry[Item]] = field(default_factory=deque)  # oldest first, never empty


class _Class(Generic[Item]):
    """Pending requests of one priority."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant[Item]] = {}  # tenants with pending requests, by name
        self.tokens = 0
        self._clock = 0.0  # virtual time of the tenant that was served last
        self._left: dict[str, float] = {}  # by name: virtual times of inactive tenants, if later than the clock

    @property
    def oldest(self) -> int:
        return min(tenant.entries[0].number for tenant in self.tenants.values())

    def start_of(self, name: str) -> float:
        """Return the virtual time at which a new request of this tenant would start."""
        tenant = self.tenants.get(name)
        return max(self._clock, self._left.get(name, 0.0)) if tenant is None else tenant.start + tenant.tokens

    def charge(self, name: str, tokens: int) -> None:
        """Advance a tenant's virtual time."""
        start = self.start_of(name) if name not in self.tenants else self.tenants[name].start
        advanced = max(start, min(start + tokens, self._clock + MAX_AHEAD_TOKENS))
        if name in self.tenants:
            self.tenants[name].start = advanced
        else:
            self._left[name] = advanced

    def add(self, entry: Entry[Item]) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            tenant = self.tenants[entry.tenant] = _Tenant(self.start_of(entry.tenant))
            self._left.pop(entry.tenant, None)
        tenant.entries.append(entry)
        tenant.tokens += entry.tokens
        self.tokens += entry.tokens

    def remove(self, entry: Entry[Item], served: bool) -> None:
        tenant = self.tenants[entry.tenant]
        tenant.entries.remove(entry)
        tenant.tokens -= entry.tokens
        self.tokens -= entry.tokens
        if served:
            self._clock = max(self._clock, tenant.start)
            tenant.start += entry.tokens
        if not tenant.entries:
            del self.tenants[entry.tenant]
            self._left = {name: start for name, start in self._left.items() if start > self._clock}
            self._left[entry.tenant] = tenant.start

    def order(self) -> Iterator[Entry[Item]]:
        """Yield the pending requests in order of service. They must not change during the iteration."""
        ahead = [(tenant.start, tenant.entries[0].number, 0, tenant.entries) for tenant in self.tenants.values()]
        heapq.heapify(ahead)
        while ahead:
            start, _, index, entries = ahead[0]
            entry = entries[index]
            yield entry
            if index + 1 < len(entries):
                following = (start + entry.tokens, entries[index + 1].number, index + 1, entries)
                heapq.heapreplace(ahead, following)
            else:
                heapq.heappop(ahead)


class FairQueue(Generic[Item]):
    """Fair queue of requests. `take` removes a served request, `withdraw` an unserved one at no cost for its tenant."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class[Item]] = {}  # non-empty classes by priority
        self._by_tenant: Counter[str] = Counter()
        self._arrivals = 0
        self._spare = 0.0  # tokens that may be served to lower-priority classes before the first class

    def __len__(self) -> int:
        return self._by_tenant.total()

    def waiting_of(self, tenant: str) -> int:
        return self._by_tenant[tenant]

    def has_before(self, priority: int) -> bool:
        """Return whether a request of an earlier class, with a lower value than `priority`, is pending."""
        return bool(self._classes) and min(self._classes) < priority

    def add(self, item: Item, tenant: str, priority: int, tokens: int) -> Entry[Item]:
        self._arrivals += 1
        entry = Entry(item, tenant, priority, max(1, tokens), self._arrivals)
        self._classes.setdefault(priority, _Class()).add(entry)
        self._by_tenant[tenant] += 1
        return entry

    def take(self, entry: Entry[Item]) -> None:
        """Remove a served request, which need not be the next. Raises: KeyError or ValueError if it is not pending."""
        if len(self._classes) == 1:
            self._spare = 0.0
        elif entry.priority == min(self._classes):
            self._spare += entry.tokens * SPARE_SHARE / (1 - SPARE_SHARE)
        else:
            self._spare = max(0.0, self._spare - entry.tokens)
        self._remove(entry, served=True)

    def withdraw(self, entry: Entry[Item]) -> None:
        """Remove a request without serving it. Raises: KeyError or ValueError if it is not pending."""
        self._remove(entry, served=False)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens that another router served for a tenant."""
        for each in self._classes.values():
            each.charge(tenant, tokens)

    def order(self) -> Iterator[Entry[Item]]:
        """Yield the entries in order of service. The queue must not change during the iteration."""
        due = self._due()
        if due is not None:
            yield due
        for priority in sorted(self._classes):
            yield from (entry for entry in self._classes[priority].order() if entry is not due)

    def newest_of_largest(self) -> Entry[Item] | None:
        """Return the newest request of the tenant that has most pending requests; None if the queue is empty."""
        if not self._by_tenant:
            return None
        largest, _ = self._by_tenant.most_common(1)[0]
        waiting = (each.tenants.get(largest) for each in self._classes.values())
        return max((tenant.entries[-1] for tenant in waiting if tenant is not None), key=lambda entry: entry.number)

    def tokens_ahead(self, tenant: str, priority: int) -> float:
        """Estimate the tokens served before a new request of `tenant`.

        Adding pending requests never lowers the estimate.
        """
        ahead = float(sum(each.tokens for earlier, each in self._classes.items() if earlier < priority))
        own = self._classes.get(priority)
        if own is not None:
            start = own.start_of(tenant)
            for name, other in own.tenants.items():
                if name == tenant:
                    ahead += other.tokens
                elif other.start <= start:
                    ahead += min(other.tokens, start - other.start + other.entries[0].tokens)
        return ahead / (1 - SPARE_SHARE) if any(later > priority for later in self._classes) else ahead

    def _due(self) -> Entry[Item] | None:
        """Return the next request of the lower-priority classes, if the spare tokens cover it."""
        if len(self._classes) < 2:
            return None
        first = min(self._classes)
        others = [each for priority, each in self._classes.items() if priority != first]
        head = next(min(others, key=lambda each: each.oldest).order())
        return head if head.tokens <= self._spare else None

    def _remove(self, entry: Entry[Item], served: bool) -> None:
        of_priority = self._classes[entry.priority]
        of_priority.remove(entry, served)
        if not of_priority.tenants:
            del self._classes[entry.priority]
        self._by_tenant[entry.tenant] -= 1
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]
