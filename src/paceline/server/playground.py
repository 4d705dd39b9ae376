"""The playground, in plain HTML and JavaScript from ``static/``: the inspector at ``/`` and the chat at ``/chat``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from os import PathLike, stat_result
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
PAGES = {"/": "index.html", "/chat": "chat.html"}
MEDIA_TYPES = {  # the system's table differs between machines
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    # Only files of this server, nothing inline: text that a model generated cannot run as a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Assets(StaticFiles):
    """Scripts, styles and images, with the page's security headers."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update({**HEADERS, "Content-Type": MEDIA_TYPES[Path(full_path).suffix]})
        return response


def add_playground(app: FastAPI, enabled: bool) -> None:
    """Serve the pages, and their files below ``/playground/``; 404 at all of them unless it is enabled."""
    if not enabled:
        app.get("/", include_in_schema=False)(_no_page)  # else 405, because HEAD / exists
        return

    for path, name in PAGES.items():
        app.get(path, include_in_schema=False)(_serve(STATIC / name))
    app.mount("/playground", Assets(directory=STATIC))


def _serve(file: Path) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        return FileResponse(file, media_type=MEDIA_TYPES[".html"], headers=HEADERS)

    return page


async def _no_page() -> Response:
    raise HTTPException(404)
