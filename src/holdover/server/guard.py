"""Who may talk to the server: pages that it served itself, and programs of this machine that no page stands behind.

Any web page can make a browser send requests to 127.0.0.1. So the Host header must name this server (a name that an
attacker's DNS points here does not), an Origin must be its own, a browser must not say that the request comes from
another site, and what changes anything must be JSON, which a page of another origin cannot send unasked.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY_BYTES = 16 * 1024
HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class Guard:
    """Refuse requests from elsewhere before the application sees them."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks WebSocket: the connection is closed
        refusal = self.refusal(scope["method"], Headers(scope=scope))
        if refusal is not None:
            status, text = refusal
            await PlainTextResponse(text + "\n", status, HEADERS)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, with_headers)

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Status and text, or None for a request that may pass."""
        if len(headers.getlist("host")) != 1 or headers["host"] not in self.hosts:
            return 403, f"refused: the Host header must be one of {', '.join(sorted(self.hosts))}"
        origins = headers.getlist("origin")
        if origins and (len(origins) > 1 or origins[0] not in {f"http://{host}" for host in self.hosts}):
            return 403, "refused: the request comes from another origin"
        site = headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none") or (site == "none" and origins and method != "GET"
                                                   and "sec-fetch-site" in headers):  # fmt: skip
            return 403, "refused: the request comes from another site"
        if method not in ("GET", "HEAD"):
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > MOST_BODY_BYTES or "transfer-encoding" in headers:
                return 413, f"refused: a body of at most {MOST_BODY_BYTES} bytes, its length given"
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return 415, "refused: send application/json"
        return None
