"""A server of one live page, on this machine's loopback interface alone.

It answers two paths, ``/`` and ``/now``, and reads nothing else from the disk. A request must name the loopback
interface as its host: a page of another site that resolves its own name to 127.0.0.1 gets no answer (DNS rebinding).
``/now`` answers its own page alone, and not the scripts of others.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, Protocol

from shardwise.core.errors import DataError, ResourceError

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost")
_SAME_ORIGIN = ("same-origin", "none")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ServedPage(Protocol):
    """A page that changes.

    Attributes:
        policy: its content security policy.
    """

    @property
    def policy(self) -> str: ...

    def page(self) -> str:
        """The page as HTML."""

    def now(self, query: str) -> str | None:
        """The changes since the state that the page's query names, as JSON; None if nothing."""


def page_server(page: ServedPage, port: int) -> ThreadingHTTPServer:
    """A server for ``page``; it answers once ``serve_forever`` is called. Port 0 takes a free one.

    Raises:
        ResourceError: the port is taken.
    """
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            path, _, query = self.path.partition("?")
            if host not in _HOSTS:
                self._send(403, "text/plain", "this page is for this machine alone")
                return
            if path != "/" and self.headers.get("Sec-Fetch-Site", "same-origin") not in _SAME_ORIGIN:
                self._send(403, "text/plain", "this answers its own page alone")
                return
            with lock:  # one drawing at a time; a reader may take longer
                answer = _answer(page, path, query)
            self._send(*answer)

        def _send(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Security-Policy", f"{page.policy}; frame-ancestors 'none'")
            if code != 204:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Requests are not logged."""

    try:
        server = _Server((LOOPBACK, port), Handler)
    except OSError as error:
        why = error.strerror or str(error)
        fix = "give another with --port, or 0 for a free one"
        raise ResourceError("cannot open the port", where=f"{LOOPBACK}:{port}", why=why, fix=fix) from error
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a trace, but not of a browser that has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _answer(page: ServedPage, path: str, query: str) -> tuple[int, str, str]:
    """Status, type and text of the answer."""
    try:
        if path == "/":
            return 200, "text/html", page.page()
        if path == "/now":
            news = page.now(query)
            return 204 if news is None else 200, "application/json", news or ""
    except DataError as error:
        return 503, "text/plain", error.line()
    return 404, "text/plain", "there is no such page"
