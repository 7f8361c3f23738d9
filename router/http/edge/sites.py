"""Rules for web pages that call a router without keys: a browser carries any site's pages past loopback and firewalls.

DNS rebinding shows as an unknown Host. Other foreign pages are identified by the browser's Sec-Fetch-Site or Origin.
Pure.
"""

from collections.abc import Collection, Mapping
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from baton.process.errors import PermissionDenied
from baton.router.http.page.files import is_public

_ANY = "*"
_OWN_SITES = ("same-origin", "none")  # the page itself, and its user


class SiteRules:
    """Rules for the Host and the origin of calls."""

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        """Create the rules. `hosts`: names besides `localhost` and addresses; `*.NAME` allows subdomains, `*` all."""
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = frozenset(origins)

    def check(self, scope: Scope) -> None:
        """Check a call. Raises: PermissionDenied."""
        headers = Headers(scope=scope)
        host = headers.get("host")
        if host is not None and not self._knows(_name_of(host)):
            message = f"host: {host[:100]} is not a name of this router; --allowed-hosts of the router adds names"
            raise PermissionDenied(message, "HOST_NOT_ALLOWED")
        if not (self._is_own(headers, host or "") or _opens_page(scope, headers)):
            message = "a page of another site may not call this router; --cors-origins of the router allows origins"
            raise PermissionDenied(message, "CROSS_SITE")

    def _knows(self, name: str) -> bool:
        if _ANY in self._hosts or name in self._hosts or _is_address(name):
            return True
        parents = name.split(".")[1:]
        return any(f"*.{'.'.join(parents[at:])}" in self._hosts for at in range(len(parents)))

    def _is_own(self, headers: Mapping[str, str], host: str) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and (_ANY in self._origins or origin in self._origins):
            return True
        if site is not None:
            return site in _OWN_SITES
        return origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Let pages of these origins read the answers of the application. Preflights, which have no key, need none."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("x-request-id", "retry-after"),
    )


def _name_of(host: str) -> str:
    """Return the name or address without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _opens_page(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Check whether the call follows a link from another site to the router's own page."""
    is_document = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return is_document and is_public(scope)
