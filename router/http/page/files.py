"""Static files of the web page. They contain no data of clients, so every client may read them."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.types import Scope

from baton.router.http.edge.exchange import FullReply, Reply

FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PARTS = sorted(file.name for file in FOLDER.iterdir() if file.suffix in (".css", ".js", ".svg"))
FILES = {"/": "index.html", "/docs": "docs.html", **{f"/page/{name}": name for name in _PARTS}}
"""Names of the files, by URL path. Other files are not served."""

# The page may not load content of other origins or inline code, send forms, or be shown in a frame.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def is_public(scope: Scope) -> bool:
    """Return whether the call reads one of the page's files."""
    return scope["path"] in FILES and scope["method"] in ("GET", "HEAD")


def file_answers() -> dict[str, Callable[[Scope], Awaitable[Reply]]]:
    """Read the files, and return functions that answer with them, by path. Raises: OSError."""
    return {path: _answer(FOLDER / name) for path, name in FILES.items()}


def _answer(file: Path) -> Callable[[Scope], Awaitable[Reply]]:
    reply = FullReply(file.read_bytes(), media_type=_MEDIA_TYPES[file.suffix], headers=HEADERS)

    async def answer(scope: Scope) -> Reply:
        return reply

    return answer
