"""Protection of a router without API keys from web pages: a browser behind its firewall runs pages of any site.

A page that uses DNS rebinding sends an unknown Host. Other foreign pages are identified by the browser's header
Sec-Fetch-Site or Origin. Pure.
"""

from collections.abc import Collection, Mapping
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from baton.process.errors import PermissionDenied
from baton.router.http.page.files import is_public

_ANY = "*"
_OWN_SITES = ("same-origin", "none")  # values of Sec-Fetch-Site for calls by the router's page, and by the user


class SiteRules:
    """Rules for the headers Host and Origin of calls."""

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        """Create the rules. `localhost` and addresses are always allowed as hosts.

        `hosts`: further allowed names; `*.NAME` allows subdomains, `*` all names. `origins`: foreign sites whose pages
        may call the router; `*` allows all.
        """
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = frozenset(origins)

    def check(self, scope: Scope) -> None:
        """Check host and origin of a call. Raises: PermissionDenied."""
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
    """Wrap `app` so that pages of these origins can read its answers. Preflight requests are answered without a key."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("x-request-id", "retry-after"),
    )


def _name_of(host: str) -> str:
    """Return the name or address in a Host header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _opens_page(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Return whether the call opens the router's own page, for example by a link on another site."""
    is_document = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return is_document and is_public(scope)
